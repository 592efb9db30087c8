/* Elements of memory as f32, alone and four at once.
 *
 * Enters: scalar.c. Leaves: types of elements (f32_of, bf16_of, f16_of) with `type`, `number` and `element`, and of codes (i8_of,
 * f8_of) without the last; quad, four floats in one access; four_at. A quad's address is a multiple of 16 bytes, of narrow elements
 * of 8, of codes of 4.
 */
#define METHOD __device__ __forceinline__

struct alignas(16) quad {
    float x, y, z, w;
};

/* Four elements of 16 bits. */
struct alignas(8) four_halves {
    uint32_t low, high;
};

struct f32_of {
    typedef float type;
    static METHOD float number(float x) { return x; }
    static METHOD float element(float x) { return x; }
    static METHOD quad four(const float *at) { return *(const quad *)at; }
};

template <class Element> METHOD quad four_numbers(const uint16_t *at) {
    four_halves h = *(const four_halves *)at;
    return {Element::number((uint16_t)h.low), Element::number((uint16_t)(h.low >> 16)), Element::number((uint16_t)h.high),
            Element::number((uint16_t)(h.high >> 16))};
}

struct bf16_of {
    typedef bf16 type;
    static METHOD float number(bf16 x) { return bf16_to_f32(x); }
    static METHOD bf16 element(float x) { return f32_to_bf16(x); }
    static METHOD quad four(const bf16 *at) { return four_numbers<bf16_of>(at); }
};

struct f16_of {
    typedef f16 type;
    static METHOD float number(f16 x) { return f16_to_f32(x); }
    static METHOD f16 element(float x) { return f32_to_f16(x); }
    static METHOD quad four(const f16 *at) { return four_numbers<f16_of>(at); }
};

struct i8_of {
    typedef int8_t type;
    static METHOD float number(int8_t x) { return (float)x; }
    static METHOD quad four(const int8_t *at) {
        const uint32_t all = *(const uint32_t *)at;
        return {number((int8_t)all), number((int8_t)(all >> 8)), number((int8_t)(all >> 16)), number((int8_t)(all >> 24))};
    }
};

struct f8_of {
    typedef f8e4m3 type;
    static METHOD float number(f8e4m3 x) { return f8e4m3_to_f32(x); }
    static METHOD quad four(const f8e4m3 *at) {
        const uint32_t all = *(const uint32_t *)at;
        return {number((f8e4m3)all), number((f8e4m3)(all >> 8)), number((f8e4m3)(all >> 16)), number((f8e4m3)(all >> 24))};
    }
};
