/* Elements of memory as f32, alone and four at once.
 *
 * Enters: scalar.c. Leaves: types of elements (f32_of, bf16_of, f16_of) with `type`, `number` and `element`; quad, four floats in
 * one access; four_at. A quad's address is a multiple of 16 bytes, of narrow elements of 8.
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
