/* The matrix unit's way through `grouped.c` and `grouped_outer.c`, included before them where both sides are bf16 values: a
 * group is one dot of `dot_free_amx.c`, whose slots see the group's numbers behind the symbols in `dims`.
 *
 *   NAME(x)                        prefixes a symbol of this kernel; NAME(amx_x) those of the dot
 *   SYMBOLS                        symbols in `dims`; GROUP, FIRST, COUNT: a group, its first row and its rows, behind them
 */
#ifdef DOT_PAIRS
#define GROUPED_MATRIX_UNIT dot_amx
enum { NAME(amx_bytes) = NAME(amx_near) * 2048 + NAME(amx_highest) * NAME(amx_widest) * 4096 };
_Static_assert(2 * NAME(amx_highest) * DOT_PAIRS_STEPS <= NAME(amx_near), "blocks of depth take no more than whole sums");

/* Tiles t .. t_end by panels p .. p_end of the dot of rows first .. first + count; `near` as in the dot. */
static void NAME(amx_part)(void *const *bufs, const int64_t *dims, const char *scratch, char *near, int packed,
                           int64_t group, int64_t first, int64_t count, const int64_t at[4])
{
    int64_t own[SYMBOLS + 3];
    for (int i = 0; i < SYMBOLS; i++) own[i] = dims[i];
    own[SYMBOLS] = group, own[SYMBOLS + 1] = first, own[SYMBOLS + 2] = count;
    NAME(amx_amx_unit)(bufs, own, scratch, near, packed, at[0], at[1], at[2], at[3]);
}
#endif
