/* The matrix unit's way through `grouped.c` and `grouped_outer.c`, included before them where both sides are bf16 values, or
 * both f32: a group is one dot of `dot_free_amx.c` or `dot_free_split.c`, whose slots see the group's numbers behind the
 * symbols in `dims`.
 *
 *   NAME(x)                        prefixes a symbol of this kernel; NAME(amx_x) those of the dot
 *   SYMBOLS                        symbols in `dims`; GROUP, FIRST, COUNT: a group, its first row and its rows, behind them
 *
 * Leaves GROUPED_SPLIT where sides are f32, and for sums of a literal length GROUPED_TILES and GROUPED_PANELS, which a block
 * has at most.
 */
#ifdef DOT_PAIRS
#define GROUPED_MATRIX_UNIT dot_amx
#ifdef DOT_SPLIT_SIDES
#define GROUPED_SPLIT
enum { NAME(amx_bytes) = NAME(amx_amx_bytes) };
#define GROUPED_TILES NAME(amx_highest)
#define GROUPED_PANELS (NAME(depth32) > NAME(amx_block) ? NAME(amx_widest) : NAME(amx_near) / NAME(depth32))
#else
enum { NAME(amx_bytes) = NAME(amx_near) * 2048 + NAME(amx_highest) * NAME(amx_widest) * 4096 };
_Static_assert(2 * NAME(amx_highest) * DOT_PAIRS_STEPS <= NAME(amx_near), "blocks of depth take no more than whole sums");
/* As many tiles as the dot takes at once; where sums are longer, those of so many panels wait. */
#define GROUPED_TILES                                                                                                  \
    (NAME(depth32) > NAME(amx_whole) || NAME(amx_near) / NAME(depth32) > NAME(amx_highest)                             \
         ? NAME(amx_highest)                                                                                           \
         : NAME(amx_near) / NAME(depth32))
#define GROUPED_PANELS (NAME(depth32) > NAME(amx_whole) ? NAME(amx_widest) : NAME(panels))
#endif

/* Tiles t .. t_end by panels p .. p_end of the dot of rows first .. first + count; `rows` and `near` as in the dot. `again`: the
 * unit before, on this thread, had the same tiles; of sums no longer than bf16 takes at once, they then lie in `near`. */
static void NAME(amx_part)(void *const *bufs, const int64_t *dims, const char *rows, char *near, int again, int64_t group,
                           int64_t first, int64_t count, int64_t depth, const int64_t at[4])
{
    int64_t own[SYMBOLS + 3];
    for (int i = 0; i < SYMBOLS; i++) own[i] = dims[i];
    own[SYMBOLS] = group, own[SYMBOLS + 1] = first, own[SYMBOLS + 2] = count;
#ifdef GROUPED_SPLIT
    (void)again, (void)depth;
    NAME(amx_amx_unit)(bufs, own, rows, near, at[0], at[1], at[2], at[3]);
#else
    int packed = again && (depth + 31) / 32 <= (int)NAME(amx_whole);
    NAME(amx_amx_unit)(bufs, own, rows, near, packed, at[0], at[1], at[2], at[3]);
#endif
}
#endif
