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
/* A division by zero gives 0: a kernel has no way to refuse. */
INLINE int64_t i_div(int64_t a, int64_t b) { return b == 0 ? 0 : b == -1 ? 0 - a : a / b; }
