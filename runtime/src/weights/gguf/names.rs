//! Names of tensors. In: the name that a checkpoint has, as transformers writes it. Out: the name that a GGUF file has for it, and in which
//! order its numbers lie.

/// Factors on the rotary frequencies: Llama 3.1's, of which a configuration is made as of LongRoPE's for long texts and for short ones.
pub const ROPE_FACTORS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// In which order a tensor's numbers lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As in a checkpoint.
    Plain,
    /// So many heads, whose halves are interleaved row by row, for a rotation of neighbours.
    Interleaved(usize),
    /// The tensor of this expert behind those of others, of all of a layer.
    Expert(usize),
    /// With 1 added to each: the scales of Gemma's norms.
    OneMore,
    /// In two tensors what makes keys and values of latents: of so many heads rows of keys, transposed, and rows of values.
    Latents([usize; 3]),
    /// Of all experts of a layer, each transposed.
    Stacked,
    /// The same, or a bias `[experts, rows]`, of which two tensors have a row each by turns: gates and what they let through.
    Paired,
}

/// Where a tensor lies in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InFile {
    /// Its name there; of two the first.
    pub name: String,
    /// The order there.
    pub order: Order,
}

/// How the layers of a file differ from those of others.
#[derive(Clone, Copy, Debug, Default)]
pub struct Layers {
    /// Heads of queries and of keys, where their halves are interleaved.
    pub interleaved: Option<[usize; 2]>,
    /// Names of modules that other files have for something else.
    pub own: &'static [(&'static str, &'static str)],
    /// Whether each scale of a norm is 1 more.
    pub one_more: bool,
    /// Heads, rows of keys and rows of values, where what makes them of latents is in two tensors.
    pub latents: Option<[usize; 3]>,
}

/// Names outside of layers.
const OUTSIDE: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Names of modules in a layer with norms behind attention and MLP, and of these alone.
pub const NORMS_BEHIND: &[(&str, &str)] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// What of gpt-oss has another name: its norm before the MLP.
pub const OF_GPT_OSS: &[(&str, &str)] = &[("post_attention_layernorm", "post_attention_norm")];

/// Names of what is no module with a weight or a bias.
const WHOLE: [(&str, &str, Order); 6] = [
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias", Order::Plain),
    ("self_attn.sinks", "attn_sinks.weight", Order::Plain),
    ("mlp.experts.gate_up_proj", "ffn_gate_exps.weight", Order::Paired),
    ("mlp.experts.gate_up_proj_bias", "ffn_gate_exps.bias", Order::Paired),
    ("mlp.experts.down_proj", "ffn_down_exps.weight", Order::Stacked),
    ("mlp.experts.down_proj_bias", "ffn_down_exps.bias", Order::Plain),
];

/// Names of modules in a layer.
const INSIDE: [(&str, &str); 27] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("post_self_attn_layernorm", "post_attention_norm"),
    ("post_mlp_layernorm", "post_ffw_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.router", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
];

/// Names of an expert's matrices.
const EXPERTS: [(&str, &str); 6] = [
    ("gate_proj", "ffn_gate_exps"),
    ("up_proj", "ffn_up_exps"),
    ("down_proj", "ffn_down_exps"),
    ("w1", "ffn_gate_exps"),
    ("w3", "ffn_up_exps"),
    ("w2", "ffn_down_exps"),
];

fn known(names: &[(&'static str, &'static str)], name: &str) -> Option<&'static str> {
    names.iter().find(|(from, _)| *from == name).map(|(_, to)| *to)
}

impl InFile {
    /// The place of a checkpoint's tensor in a file of such layers.
    pub fn of(name: &str, layers: &Layers) -> Option<InFile> {
        let norm = |to: &str| layers.one_more && to.ends_with("norm");
        if let Some(to) = known(&OUTSIDE, name) {
            let order = if norm(to.trim_end_matches(".weight")) { Order::OneMore } else { Order::Plain };
            return Some(InFile { name: to.into(), order });
        }
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let place = |to: &str, kind: &str, order: Order| {
            Some(InFile { name: format!("blk.{layer}.{to}.{kind}"), order })
        };
        if let Some((_, to, order)) = WHOLE.iter().find(|(from, ..)| *from == rest) {
            return Some(InFile { name: format!("blk.{layer}.{to}"), order: *order });
        }
        let (module, kind) = rest.rsplit_once('.')?;
        let expert =
            ["mlp.experts.", "block_sparse_moe.experts."].into_iter().find_map(|p| module.strip_prefix(p));
        if let Some((number, matrix)) = expert.and_then(|e| e.split_once('.')) {
            return place(known(&EXPERTS, matrix)?, kind, Order::Expert(number.parse().ok()?));
        }
        let to = known(layers.own, module).or_else(|| known(&INSIDE, module))?;
        match (to, layers.interleaved, layers.latents) {
            ("attn_q", Some([heads, _]), _) | ("attn_k", Some([_, heads]), _) => {
                place(to, kind, Order::Interleaved(heads))
            }
            ("attn_kv_b", _, Some(latents)) => place("attn_k_b", kind, Order::Latents(latents)),
            _ => place(to, kind, if norm(to) { Order::OneMore } else { Order::Plain }),
        }
    }

    /// Where row `row` of a checkpoint's `rows` lies.
    pub fn row(&self, row: usize, rows: usize) -> usize {
        match self.order {
            Order::Interleaved(heads) => interleaved(row, rows / heads.max(1)),
            _ => row,
        }
    }

    /// The name of the second tensor of two.
    pub fn second(&self) -> Option<String> {
        match self.order {
            Order::Latents(_) => Some(self.name.replace("attn_k_b", "attn_v_b")),
            Order::Paired => Some(self.name.replace("ffn_gate_exps", "ffn_up_exps")),
            _ => None,
        }
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
    fn names_and_orders_of_a_layer() {
        let llama = Layers { interleaved: Some([4, 2]), ..Layers::default() };
        let gemma = Layers { own: NORMS_BEHIND, one_more: true, ..Layers::default() };
        let gpt_oss = Layers { own: OF_GPT_OSS, ..Layers::default() };
        let deepseek = Layers { latents: Some([4, 16, 8]), ..Layers::default() };
        for (layers, name, to, order) in [
            (llama, "model.layers.3.self_attn.k_proj.bias", "blk.3.attn_k.bias", Order::Interleaved(2)),
            (llama, "lm_head.weight", "output.weight", Order::Plain),
            (
                llama,
                "model.layers.1.block_sparse_moe.experts.7.w2.weight",
                "blk.1.ffn_down_exps.weight",
                Order::Expert(7),
            ),
            (gemma, "model.norm.weight", "output_norm.weight", Order::OneMore),
            (
                gemma,
                "model.layers.0.post_attention_layernorm.weight",
                "blk.0.post_attention_norm.weight",
                Order::OneMore,
            ),
            (gemma, "model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", Order::Plain),
            (
                deepseek,
                "model.layers.2.self_attn.kv_b_proj.weight",
                "blk.2.attn_k_b.weight",
                Order::Latents([4, 16, 8]),
            ),
            (
                deepseek,
                "model.layers.2.mlp.gate.e_score_correction_bias",
                "blk.2.exp_probs_b.bias",
                Order::Plain,
            ),
            (gpt_oss, "model.layers.4.mlp.experts.gate_up_proj", "blk.4.ffn_gate_exps.weight", Order::Paired),
            (gpt_oss, "model.layers.4.self_attn.sinks", "blk.4.attn_sinks.weight", Order::Plain),
            (gpt_oss, "model.layers.4.mlp.router.bias", "blk.4.ffn_gate_inp.bias", Order::Plain),
        ] {
            assert_eq!(InFile::of(name, &layers), Some(InFile { name: to.into(), order }), "{name}");
        }
        assert_eq!(InFile::of("model.layers.3.mlp.experts", &llama), None);
        let rows: Vec<usize> = (0..8).map(|r| interleaved(r, 4)).collect();
        assert_eq!(rows, [0, 2, 1, 3, 4, 6, 5, 7]);
    }
}
