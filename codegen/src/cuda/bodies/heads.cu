/* Heads of tokens in memory.
 *
 * Enters: values.cu; BLOCK. Leaves: heads_at, a value [tokens, heads, d] whose heads' elements lie one after another; heads_stage,
 * which brings lines of such to shared memory.
 */
template <class Element> struct heads_at {
    const typename Element::type *at;
    index_t row, head;
    METHOD const typename Element::type *of(index_t token, index_t h) const { return at + token * row + h * head; }
};

/* Elements first .. first + WIDTH of heads of `size` at line(0) .. line(count - 1) to lines of shared memory, zeros beyond the
 * heads and the last of them. FOUR: four at once. */
template <class Element, bool FOUR, int WIDTH, class Line>
METHOD void heads_stage(float *to, int length, int first, int size, int count, int lines, const Line &line) {
    if (FOUR) {
        for (int at = (int)threadIdx.x; at < lines * (WIDTH / 4); at += BLOCK) {
            const int of = at / (WIDTH / 4), d = at % (WIDTH / 4) * 4;
            quad q = {0.0f, 0.0f, 0.0f, 0.0f};
            if (of < count && first + d < size) q = Element::four(line(of) + first + d);
            *(quad *)(to + of * length + d) = q;
        }
        return;
    }
    for (int at = (int)threadIdx.x; at < lines * WIDTH; at += BLOCK) {
        const int of = at / WIDTH, d = at % WIDTH;
        to[of * length + d] = of < count && first + d < size ? Element::number(line(of)[first + d]) : 0.0f;
    }
}
