/* Elements of memory as f32, alone and four at once.
 *
 * Enters: scalar.c. Leaves: types of elements (f32_of, bf16_of, f16_of) with `type`, `number` and `element`, and of codes (i8_of,
 * f8_of) without the last; types of weights' codes (int8_code, int4_code, fp8_code, fp4_code), which may be two to a byte; quad, four floats in one
 * access. A quad's address is a multiple of 16 bytes, of narrow elements of 8, of codes of 4, of two codes to a byte of 2. `pair` of codes: the
 * bf16 of two neighbours, which lie in the lowest bits of its argument.
 */
#define METHOD __device__ __forceinline__

struct alignas(16) quad {
    float x, y, z, w;
};

/* Four elements of 16 bits. */
struct alignas(8) four_halves {
    uint32_t low, high;
};

/* Two numbers that bf16 holds, as a pair of these. */
METHOD uint32_t exact_pair(float low, float high) { return f32_bits(low) >> 16 | (f32_bits(high) & 0xffff0000u); }

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
    /* A code plus 128 in the lowest bits of 2^23 is that number. */
    static METHOD uint32_t pair(uint32_t x) {
        const uint32_t codes = x ^ 0x8080u;
        return exact_pair(bits_f32(0x4b000000u | (codes & 0xffu)) - 8388736.0f, bits_f32(0x4b000000u | codes >> 8) - 8388736.0f);
    }
};

struct f8_of {
    typedef f8e4m3 type;
    static METHOD float number(f8e4m3 x) { return f8e4m3_to_f32(x); }
    static METHOD quad four(const f8e4m3 *at) {
        const uint32_t all = *(const uint32_t *)at;
        return {number((f8e4m3)all), number((f8e4m3)(all >> 8)), number((f8e4m3)(all >> 16)), number((f8e4m3)(all >> 24))};
    }
    static METHOD uint32_t pair(uint32_t x) { return exact_pair(number((f8e4m3)x), number((f8e4m3)(x >> 8))); }
};

/* The i-th number of a row, and the four from the i-th on, a multiple of four, before they are scaled. */
template <class Element> struct byte_code {
    typedef typename Element::type type;
    enum { per = 1 };
    static METHOD float number(const type *row, index_t i) { return Element::number(row[i]); }
    static METHOD quad four(const type *row, index_t i) { return Element::four(row + i); }
    static METHOD uint32_t pair(uint32_t x) { return Element::pair(x); }
};
typedef byte_code<i8_of> int8_code;
typedef byte_code<f8_of> fp8_code;

/* Two codes in a byte, the first in the lower half; Value: what four bits stand for. */
template <class Value> struct half_code {
    typedef uint8_t type;
    enum { per = 2 };
    static METHOD float number(const uint8_t *row, index_t i) { return Value::of((uint32_t)row[i / 2] >> (i % 2 * 4) & 15); }
    static METHOD quad four(const uint8_t *row, index_t i) {
        const uint32_t all = *(const uint16_t *)(row + i / 2);
        return {Value::of(all & 15), Value::of(all >> 4 & 15), Value::of(all >> 8 & 15), Value::of(all >> 12)};
    }
    static METHOD uint32_t pair(uint32_t x) { return Value::pair(x); }
};

struct int4_value {
    static METHOD float of(uint32_t code) { return (float)((int32_t)code - 8); }
    /* A code in the lowest bits of 128 is a bf16 of 128 more than that; less 136. */
    static METHOD uint32_t pair(uint32_t x) {
        uint32_t y = ((x | x << 12) & 0xf000fu) | 0x43004300u;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(y), "r"(0x3f803f80u), "r"(0xc308c308u));
        return y;
    }
};
typedef half_code<int4_value> int4_code;

/* Of e2m1: its bits as those of a float, whose exponent is 126 less. */
struct fp4_value {
    static METHOD float of(uint32_t code) {
        const float x = bits_f32((code & 7) << 22) * bits_f32(0x7e800000u);
        return code & 8 ? -x : x;
    }
    static METHOD uint32_t pair(uint32_t x) { return exact_pair(of(x & 15), of(x >> 4)); }
};
typedef half_code<fp4_value> fp4_code;
