//! Names of tensors. In: the name that a checkpoint has, as transformers writes it. Out: the name that a GGUF file has for it, and in which
//! order its rows lie.

/// Factors on the rotary frequencies, made of the configuration by the tools that write the file.
pub const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Where a tensor lies in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InFile {
    /// Its name there.
    pub name: String,
    /// Heads whose halves are interleaved row by row, for a rotation of neighbours.
    pub interleaved: Option<usize>,
}

/// Names outside of layers.
const OUTSIDE: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Names of modules in a layer.
const INSIDE: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

impl InFile {
    /// The place of a checkpoint's tensor in a file of dense layers. `heads` are those of queries and of keys where their halves are
    /// interleaved.
    pub fn of(name: &str, heads: Option<[usize; 2]>) -> Option<InFile> {
        if let Some((_, to)) = OUTSIDE.into_iter().find(|(from, _)| *from == name) {
            return Some(InFile { name: to.into(), interleaved: None });
        }
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let (module, kind) = rest.rsplit_once('.')?;
        let (_, to) = INSIDE.into_iter().find(|(from, _)| *from == module)?;
        let interleaved = match to {
            "attn_q" => heads.map(|h| h[0]),
            "attn_k" => heads.map(|h| h[1]),
            _ => None,
        };
        Some(InFile { name: format!("blk.{layer}.{to}.{kind}"), interleaved })
    }
}

/// Where row `row` of heads of `width` rows, `[2, width / 2]` each, lies among rows `[width / 2, 2]`.
pub fn interleaved(row: usize, width: usize) -> usize {
    let (head, at) = (row / width, row % width);
    let (half, i) = (at / (width / 2), at % (width / 2));
    head * width + 2 * i + half
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_rows_of_a_layer() {
        let stored = |name| InFile::of(name, Some([4, 2])).map(|s| (s.name, s.interleaved));
        let k = stored("model.layers.3.self_attn.k_proj.bias");
        assert_eq!(k, Some(("blk.3.attn_k.bias".into(), Some(2))));
        assert_eq!(stored("lm_head.weight"), Some(("output.weight".into(), None)));
        assert_eq!(stored("model.layers.3.mlp.experts"), None);
        let rows: Vec<usize> = (0..8).map(|r| interleaved(r, 4)).collect();
        assert_eq!(rows, [0, 2, 1, 3, 4, 6, 5, 7]);
    }
}
