//! The checkpoint's names of a model's weights: plain data, one table per family.

/// The checkpoint's names. Layer parts stand between the layer's prefix and `.weight` or `.bias`.
#[derive(Debug, PartialEq)]
pub struct Names {
    /// Embedding, `[vocab, hidden]`.
    pub embed: &'static str,
    /// Prefix of layer `{i}`, up to and with its dot.
    pub layer: &'static str,
    /// Norm before attention, `[hidden]`.
    pub input_norm: &'static str,
    /// Query projection, `[heads * head_dim, hidden]`.
    pub q: &'static str,
    /// Key projection, `[kv_heads * head_dim, hidden]`.
    pub k: &'static str,
    /// Value projection, `[kv_heads * head_dim, hidden]`.
    pub v: &'static str,
    /// Where the checkpoint has one tensor for the three: its rows are those of the query, key and value projections.
    pub qkv: Option<&'static str>,
    /// Norm of queries, `[head_dim]` or as wide as they are.
    pub q_norm: &'static str,
    /// Norm of keys, `[head_dim]` or as wide as they are.
    pub k_norm: &'static str,
    /// Gate on the attention output, `[heads * head_dim, hidden]`.
    pub gate: &'static str,
    /// Scores that join each head's softmax, `[heads]`, whole but for the layer's prefix.
    pub sinks: Option<&'static str>,
    /// Output projection, `[hidden, heads * head_dim]`.
    pub o: &'static str,
    /// Norm of what attention adds to the stream, `[hidden]`.
    pub attention_out_norm: &'static str,
    /// Norm before the MLP, `[hidden]`.
    pub post_attention_norm: &'static str,
    /// MLP gate, `[intermediate, hidden]`.
    pub mlp_gate: &'static str,
    /// MLP up, `[intermediate, hidden]`.
    pub mlp_up: &'static str,
    /// Where the checkpoint has one tensor for gate and up: its rows are those of the gate, then of up.
    pub mlp_gate_up: Option<&'static str>,
    /// MLP down, `[hidden, intermediate]`.
    pub mlp_down: &'static str,
    /// Norm of what the MLP adds to the stream, `[hidden]`.
    pub mlp_out_norm: &'static str,
    /// Last norm, `[hidden]`.
    pub final_norm: &'static str,
    /// Head, `[vocab, hidden]`; absent from checkpoints with tied embeddings.
    pub head: &'static str,
    /// Prefixes of tensors that belong to parts which are not built, such as an image tower.
    pub ignored_prefixes: &'static [&'static str],
}

impl Names {
    /// Name of a layer's tensor: `in_layer(3, names.q, "weight")`.
    pub fn in_layer(&self, i: usize, part: &str, suffix: &str) -> String {
        format!("{}{part}.{suffix}", self.prefix(i))
    }

    /// Prefix of the names of a layer's tensors, with its dot.
    pub fn prefix(&self, i: usize) -> String {
        self.layer.replace("{i}", &i.to_string())
    }
}
