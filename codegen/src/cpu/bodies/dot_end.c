/* The end of `dot.c`: phase 1, and its slots taken back. */
void NAME(phase1)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)
{
    const float *a = (const float *)scratch;
    int64_t tiles = NAME(tiles)(dims), blocks = NAME(row_blocks)(dims), groups = NAME(panel_groups)(dims);
#ifndef DOT_NO_MATRIX_UNIT
    if (DOT_BY_TILES) {
        NAME(matrix_units)(bufs, dims, scratch, begin, end);
        return;
    }
#endif
#ifdef DOT_AT
    if (tiles == 1) {
        int64_t p = NAME(panel)(dims, begin), p_end = NAME(panel)(dims, end);
        (DOT_M == 1 ? NAME(one_row) : NAME(one_tile))(bufs, dims, a, p, p_end);
        dot_fence();
        return;
    }
#endif
    for (int64_t u = begin; u < end; u++) {
        int64_t b = u / groups, g = u % groups;
        NAME(many_tiles)(bufs, dims, a, b * tiles / blocks, (b + 1) * tiles / blocks, NAME(panel)(dims, g),
                         NAME(panel)(dims, g + 1));
    }
    dot_fence();
}

#undef DOT_PAIRED
#undef DOT_PANEL_WORDS
#undef DOT_AT
#undef DOT_MATRIX_UNIT
#undef DOT_BY_TILES
#undef DOT_NO_MATRIX_UNIT
#undef DOT_MATRIX_TILES_PER_UNIT
#undef DOT_DIRECT
#undef DOT_DIRECT_TABLE
#undef DOT_IN_PLACE
#undef DOT_NARROW
#undef DOT_TILES
#undef DOT_HEIGHT
#undef DOT_ROWS_PER_UNIT
#undef DOT_FEW_TILES
#undef DOT_TILES_PER_UNIT
#undef DOT_PANELS_PER_UNIT
#undef DOT_UNITS
#undef NAME
#undef DOT_M
#undef DOT_N
#undef DOT_K
#undef PROLOGUE_ROW
#undef EPILOGUE
#undef PREFETCH
#undef DOT_WEIGHT_F32
#undef DOT_WEIGHT_BF16
#undef DOT_A_BF16
#undef DOT_A_AT
