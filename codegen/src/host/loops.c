/* What the printed loops use beside the prelude: NaN-propagating extremes, integer arithmetic that cannot trap.
 * Enters: prelude.c. Leaves: `m_*` on float, `i_*` on int64_t. */
#define INF_F __builtin_inff()
#define NAN_F __builtin_nanf("")
#define m_abs(x) __builtin_fabsf(x)
#define m_sqrt(x) __builtin_sqrtf(x)
#define m_floor(x) __builtin_floorf(x)

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
