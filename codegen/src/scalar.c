/* Scalar arithmetic of kernels, the same bits in both dialects.
 *
 * Enters: the dialect's prelude (fixed-width integers, index_t, INLINE, FMA, FMAD, bits of floats, m_abs, m_sqrt, m_floor,
 * m_copysign, ABS_D, infinities and NAN_F; NATIVE_HALVES where it converts bf16 and f16 itself). Leaves: element types and
 * their conversions to and from f32, `m_*` on float, `i_*` on integers.
 *
 * Every function selects instead of branching, so that gcc -O3 -fno-math-errno -fno-trapping-math vectorises loops over it
 * and warps do not diverge. NaN propagates, infinities and denormals are honoured.
 */
typedef uint16_t bf16;   /* 1.8.7 bits */
typedef uint16_t f16;    /* 1.5.10 bits */
typedef uint8_t f8e4m3;  /* 1.4.3 bits, no infinity, NaN = 0x7f */
typedef uint8_t f8e5m2;  /* 1.5.2 bits, IEEE-like */

/* Conversions: to f32 exact; from f32 to nearest, ties to even; a NaN stays a NaN. */

#ifndef NATIVE_HALVES
INLINE float bf16_to_f32(bf16 h) { return bits_f32((uint32_t)h << 16); }

INLINE bf16 f32_to_bf16(float x) {
    uint32_t u = f32_bits(x), r = u + 0x7fffu + (u >> 16 & 1);
    return (bf16)((x != x ? u | 0x400000u : r) >> 16);
}

INLINE float f16_to_f32(f16 h) {
    uint32_t m = (uint32_t)(h & 0x7fff) << 13;
    float v = bits_f32(m) * 0x1p112f; /* exact for denormals too */
    uint32_t special = m | 0x7f800000u;
    uint32_t u = m >= (0x7c00u << 13) ? special : f32_bits(v);
    return bits_f32(u | (uint32_t)(h & 0x8000) << 16);
}

/* Adding 0.5 puts the last mantissa bit of the sum at 2^-24, the spacing of f16 denormals, so that
 * the adder does the rounding; f8e4m3 and f8e5m2 use 2^14 and 2^7 likewise. */
INLINE f16 f32_to_f16(float x) {
    uint32_t u = f32_bits(x), a = u & 0x7fffffffu;
    uint32_t normal = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1)) >> 13;
    uint32_t small = f32_bits(bits_f32(a) + 0.5f) - 0x3f000000u;
    uint32_t r = a < 0x38800000u ? small : normal;
    r = a >= 0x47800000u ? 0x7c00u : r;
    r = a > 0x7f800000u ? 0x7e00u : r;
    return (f16)(r | (u >> 16 & 0x8000u));
}
#endif

INLINE float f8e4m3_to_f32(f8e4m3 h) {
    uint32_t m = (uint32_t)(h & 0x7f) << 20;
    float v = bits_f32(m) * 0x1p120f;
    uint32_t u = m == (0x7fu << 20) ? 0x7fc00000u : f32_bits(v);
    return bits_f32(u | (uint32_t)(h & 0x80) << 24);
}

/* Beyond the largest finite value (448) the result is NaN: the format has no infinity. */
INLINE f8e4m3 f32_to_f8e4m3(float x) {
    uint32_t u = f32_bits(x), a = u & 0x7fffffffu;
    uint32_t normal = (a - (120u << 23) + 0x7ffffu + ((a >> 20) & 1)) >> 20;
    uint32_t small = f32_bits(bits_f32(a) + 16384.0f) - 0x46800000u;
    uint32_t r = a < 0x3c800000u ? small : normal;
    r = a >= 0x43f00000u ? 0x7fu : r;
    return (f8e4m3)(r | (u >> 24 & 0x80u));
}

INLINE float f8e5m2_to_f32(f8e5m2 h) { return f16_to_f32((f16)((uint32_t)h << 8)); }

INLINE f8e5m2 f32_to_f8e5m2(float x) {
    uint32_t u = f32_bits(x), a = u & 0x7fffffffu;
    uint32_t normal = (a - (112u << 23) + 0xfffffu + ((a >> 21) & 1)) >> 21;
    uint32_t small = f32_bits(bits_f32(a) + 128.0f) - 0x43000000u;
    uint32_t r = a < 0x38800000u ? small : normal;
    r = a >= 0x47800000u ? 0x7cu : r;
    r = a > 0x7f800000u ? 0x7eu : r;
    return (f8e5m2)(r | (u >> 24 & 0x80u));
}

/* Scalar math. Polynomials are fits of our own (weighted least squares towards the minimax). */

INLINE float m_rsqrt(float x) { return 1.0f / m_sqrt(x); }

/* e^(x - n log 2), |x - n log 2| <= log 2 / 2. */
INLINE float m_exp_rest(float x, float n) {
    float r = FMA(n, -0.693359375f, x);
    r = FMA(n, 2.12194440e-4f, r);
    float p = FMA(r, 1.382478396e-03f, 8.369384333e-03f);
    p = FMA(p, r, 4.166823626e-02f);
    p = FMA(p, r, 1.666651517e-01f);
    p = FMA(p, r, 4.999999404e-01f);
    return FMA(p, r * r, r) + 1.0f;
}

/* exp(x) = 2^k e^r; two half scales round once, so that denormal results are right. */
INLINE float m_exp(float x) {
    float c = x < -104.0f ? -104.0f : x;
    c = c > 89.0f ? 89.0f : c;
    float t = FMA(c, 1.44269504f, 12582912.0f);
    int32_t k = (int32_t)(f32_bits(t) - 0x4b400000u);
    float p = m_exp_rest(c, t - 12582912.0f);
    int32_t k1 = k >> 1, k2 = k - k1;
    return p * bits_f32((uint32_t)(k1 + 127) << 23) * bits_f32((uint32_t)(k2 + 127) << 23);
}

/* The same for x <= 0 in fewer steps: the last bits of t are the exponent of 2^(k + 65), a normal number, and the last product rounds. */
INLINE float m_exp_low(float x) {
    float c = x < -104.0f ? -104.0f : x;
    float t = FMA(c, 1.44269504f, 12583104.0f);
    return m_exp_rest(c, t - 12583104.0f) * bits_f32(f32_bits(t) << 23) * 0x1p-65f;
}

/* log(x) = e log 2 + log(1 + f), 1 + f in [sqrt(1/2), sqrt(2)). */
INLINE float m_log(float x) {
    float scaled = x * 8388608.0f;
    float xs = x < 0x1p-126f ? scaled : x;
    int32_t e0 = x < 0x1p-126f ? -23 : 0;
    uint32_t i = f32_bits(xs) - 0x3f3504f3u;
    float e = (float)(((int32_t)i >> 23) + e0);
    float f = bits_f32((i & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
    float p = FMA(f, 8.686616272e-02f, -1.426530778e-01f);
    p = FMA(p, f, 1.491881311e-01f);
    p = FMA(p, f, -1.657802165e-01f);
    p = FMA(p, f, 1.996269077e-01f);
    p = FMA(p, f, -2.500131726e-01f);
    p = FMA(p, f, 3.333392143e-01f);
    float s = f * f;
    float y = FMA(e, -2.12194440e-4f, f * s * p);
    y = FMA(-0.5f, s, y);
    float r = FMA(e, 0.693359375f, f + y);
    r = x > 0.0f ? r : NAN_F;
    r = x == 0.0f ? -INF_F : r;
    return x == INF_F ? x : r;
}

/* 1 - 2 / (e^2|x| + 1), and an odd polynomial where that cancels. */
INLINE float m_tanh(float x) {
    float t = m_abs(x), s = x * x;
    float p = FMA(s, -5.665719043e-03f, 2.060487308e-02f);
    p = FMA(p, s, -5.372953042e-02f);
    p = FMA(p, s, 1.333132386e-01f);
    p = FMA(p, s, -3.333327770e-01f);
    float small = FMA(p * s, x, x);
    float large = m_copysign(1.0f - 2.0f / (m_exp(t + t) + 1.0f), x);
    return t < 0.625f ? small : large;
}

/* erfc(t) exp(t^2) for 0 <= t <= 10.3, in the variable (t - 4) / (t + 4). */
INLINE float m_erfcx(float t) {
    float u = (t - 4.0f) / (t + 4.0f);
    float p = FMA(u, -2.862172259e-04f, -9.706123383e-04f);
    p = FMA(p, u, 4.141206387e-03f);
    p = FMA(p, u, -1.274683606e-02f);
    p = FMA(p, u, 3.129559755e-02f);
    p = FMA(p, u, -6.312552840e-02f);
    p = FMA(p, u, 1.089626551e-01f);
    p = FMA(p, u, -1.642565727e-01f);
    p = FMA(p, u, 2.187196910e-01f);
    p = FMA(p, u, -2.590680718e-01f);
    return FMA(p, u, 1.369994581e-01f);
}

INLINE float m_erf(float x) {
    float a = m_abs(x), s = x * x;
    float p = FMA(s, -2.089572263e-05f, -4.992155591e-04f);
    p = FMA(p, s, 4.843805917e-03f);
    p = FMA(p, s, -2.667176165e-02f);
    p = FMA(p, s, 1.127920672e-01f);
    p = FMA(p, s, -3.761223555e-01f);
    p = FMA(p, s, 1.283791512e-01f);
    float small = FMA(p, x, x);
    float t = a > 4.0f ? 4.0f : a;
    float large = m_copysign(1.0f - m_exp_low(-t * t) * m_erfcx(t), x);
    return a < 1.0f ? small : large;
}

/* 1 / (1 + e^-x); for x < 0 as z / (1 + z), z = e^x, which keeps the tail. */
INLINE float m_sigmoid(float x) {
    float z = m_exp_low(-m_abs(x));
    float n = x < 0.0f ? z : 1.0f;
    return n / (1.0f + z);
}

/* The activations are x times a factor that vanishes at -infinity: there the product is NaN. */
INLINE float m_silu(float x) { return x * m_sigmoid(x); }

/* x Phi(x); the lower tail is a product, never a difference. a*a is split so that exp keeps its digits. */
INLINE float m_gelu(float x) {
    float a = m_abs(x);
    a = a > 14.5f ? 14.5f : a;
    float s = a * a, rest = FMA(a, a, -s);
    float tail = m_exp_low(-0.5f * s) * (0.5f * m_erfcx(a * 0.70710678f));
    tail = FMA(tail, -0.5f * rest, tail);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

/* x (1 + tanh(u)) / 2 = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3). */
INLINE float m_gelu_tanh(float x) {
    float c = FMA(x * x, 0.071354814f, 1.595769122f);
    return x * m_sigmoid(x * c);
}

/* max(x, 0) + log(1 + z), z = e^-|x|; the last term restores what 1 + z rounded away. */
INLINE float m_softplus(float x) {
    float z = m_exp_low(-m_abs(x)), u = 1.0f + z;
    float l = m_log(u) + (z - (u - 1.0f)) / u;
    return (x > 0.0f ? x : 0.0f) + l;
}

/* sin(x + quarter pi/2). Reduced in double: good to 2^30 in magnitude, bounded by 1 beyond. */
INLINE float m_sine(float x, uint32_t quarter) {
    double d = x, t = FMAD(d, 0.63661977236758134308, 6755399441055744.0);
    uint32_t q = (uint32_t)f64_bits(t) + quarter;
    double n = t - 6755399441055744.0;
    double w = FMAD(n, -1.57079632673412561417, d);
    float r = (float)FMAD(n, -6.07710050650619224932e-11, w);
    r = r > 0.8f ? 0.8f : r;
    r = r < -0.8f ? -0.8f : r;
    float z = r * r;
    float s = FMA(z, -1.951807353e-04f, 8.332188241e-03f);
    s = FMA(s, z, -1.666665524e-01f);
    s = FMA(s * z, r, r);
    float c = FMA(z, 2.443158701e-05f, -1.388730598e-03f);
    c = FMA(c, z, 4.166664556e-02f);
    c = FMA(c * z, z, FMA(z, -0.5f, 1.0f));
    uint32_t v = q & 1 ? f32_bits(c) : f32_bits(s);
    return bits_f32(v ^ (q & 2) << 30);
}

INLINE float m_sin(float x) { return m_sine(x, 0); }
INLINE float m_cos(float x) { return m_sine(x, 1); }

/* x^y as exp(y log|x|) in double, with C's special cases. */
INLINE float m_pow(float x, float y) {
    double a = ABS_D((double)x);
    uint64_t i = f64_bits(a) - 0x3fe6a09e667f3bcdu;
    double e = bits_f64(0x4338000000000000u + (uint64_t)((int64_t)i >> 52)) - 6755399441055744.0;
    double m = bits_f64((i & 0xfffffffffffffu) + 0x3fe6a09e667f3bcdu);
    double s = (m - 1.0) / (m + 1.0), z = s * s;
    double p = FMAD(z, 1.0 / 15, 1.0 / 13);
    p = FMAD(p, z, 1.0 / 11);
    p = FMAD(p, z, 1.0 / 9);
    p = FMAD(p, z, 1.0 / 7);
    p = FMAD(p, z, 1.0 / 5);
    p = FMAD(p, z, 1.0 / 3);
    double l = FMAD(e, 0.69314718055994530942, 2.0 * FMAD(p * z, s, s));
    l = a == 0.0 ? -INF_D : l;
    l = a == INF_D ? a : l;
    double w = l * (double)y;
    w = w < -200.0 ? -200.0 : w;
    w = w > 200.0 ? 200.0 : w;
    double t = FMAD(w, 1.44269504088896340736, 6755399441055744.0);
    double r = FMAD(t - 6755399441055744.0, -0.69314718055994530942, w);
    double g = FMAD(r, 1.0 / 39916800, 1.0 / 3628800);
    g = FMAD(g, r, 1.0 / 362880);
    g = FMAD(g, r, 1.0 / 40320);
    g = FMAD(g, r, 1.0 / 5040);
    g = FMAD(g, r, 1.0 / 720);
    g = FMAD(g, r, 1.0 / 120);
    g = FMAD(g, r, 1.0 / 24);
    g = FMAD(g, r, 1.0 / 6);
    g = FMAD(g, r, 0.5);
    g = FMAD(g, r * r, r) + 1.0;
    float v = (float)(g * bits_f64((f64_bits(t) + 1023) << 52));
    double yd = y, ya = ABS_D(yd);
    double half = yd * 0.5, big = 6755399441055744.0;
    int whole = (yd + big) - big == yd || ya > 0x1p30;
    int odd = whole && (half + big) - big != half && ya < 0x1p25;
    float neg = odd ? -v : v;
    int minus = f32_bits(x) >> 31;
    float bad = x < 0.0f && !whole && a != INF_D ? NAN_F : neg;
    v = minus ? bad : v;
    v = x != x || y != y ? x + y : v;
    int one = y == 0.0f || x == 1.0f || (x == -1.0f && ya == INF_D);
    return one ? 1.0f : v;
}

/* NaN-propagating extremes, and integer arithmetic that cannot trap. */
INLINE float m_max(float a, float b) { return a > b || a != a ? a : b; }
INLINE float m_min(float a, float b) { return a < b || a != a ? a : b; }
INLINE int64_t i_max(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t i_min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t i_abs(int64_t a) { return a < 0 ? 0 - a : a; }
/* Towards zero, held inside the type; a NaN gives 0. */
INLINE int64_t f32_to_i64(float x) {
    float c = x < -0x1p63f ? -0x1p63f : x;
    c = c < 0x1p63f ? c : 0.0f;
    int64_t v = (int64_t)c;
    return x >= 0x1p63f ? INT64_MAX : v;
}
/* A division by zero gives 0: a kernel has no way to refuse. */
INLINE int64_t i_div(int64_t a, int64_t b) { return b == 0 ? 0 : b == -1 ? 0 - a : a / b; }
/* The index, held inside 0 .. n. */
INLINE index_t i_hold(index_t i, index_t n) { return i < 0 ? 0 : i < n ? i : n - 1; }

/* Element i of the stream at (seed, step): the upper 24 bits of its word of Philox4x32-10, on [0, 1). */
INLINE float random_uniform(int64_t seed, int64_t step, uint32_t stream, int64_t i) {
    uint32_t c0 = (uint32_t)(i >> 2), c1 = stream, c2 = (uint32_t)step, c3 = (uint32_t)((uint64_t)step >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)((uint64_t)seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xd2511f53u * c0, b = (uint64_t)0xcd9e8d57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b;
        c3 = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    uint32_t low = i & 1 ? c1 : c0, high = i & 1 ? c3 : c2;
    return (float)((i & 2 ? high : low) >> 8) * 0x1p-24f;
}
