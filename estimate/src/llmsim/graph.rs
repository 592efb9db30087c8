//! LLMSim's graph, of its branch `autogen`: a list of operators with symbolic shapes, as `to_dict` writes it. In: a `config.json`, or
//! such a file. Out: the file, or the operators; a file that says what its reader would trip over is refused.

use super::Keys;
use crate::Refused;
use serde_json::{Map, Value, json};

/// How an operator is listed: name, kind, width of input, output and weight, what its ranks hold, its other attributes.
struct Node<'a> {
    name: &'a str,
    /// Input and output; the weight is of both unless the operator has none.
    widths: [u64; 2],
    attention: Option<&'a str>,
    tp: Option<u64>,
    replicated: bool,
    extra: Value,
}

/// Its model types.
pub const MODELS: [&str; 3] = ["qwen3", "qwen3_moe", "deepseek_v3"];

/// Which of its builders takes a configuration: by `model_type`, else by the first of `architectures`.
pub fn model_type(config: &Value) -> Option<&'static str> {
    let stated = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    if let Some(found) = MODELS.iter().find(|m| **m == stated) {
        return Some(found);
    }
    let architecture = config.get("architectures")?.get(0)?.as_str()?.to_ascii_lowercase();
    let table = [
        ("qwen3moe", "qwen3_moe"),
        ("qwen3_moe", "qwen3_moe"),
        ("deepseekv3", "deepseek_v3"),
        ("qwen3", "qwen3"),
    ];
    table.into_iter().find(|(part, _)| architecture.contains(part)).map(|(_, name)| name)
}

/// Its graph of a configuration.
///
/// # Errors
/// It has no builder for the model, or a key is no size.
pub fn build(config: &Value) -> Result<Value, Refused> {
    let model = model_type(config).ok_or_else(|| {
        format!("LLMSim has no graph of this model_type; it has those of {}", MODELS.join(", "))
    })?;
    let keys = Keys { at: "config", fields: config.as_object().ok_or("config must be an object")? };
    let wanted = |key: &str| match keys.given(key) {
        Some(_) => keys.count(key, 1),
        None => Err(format!("config.{key} is missing")),
    };
    let layers = wanted("num_hidden_layers")?;
    let nodes = match model {
        "deepseek_v3" => latent(&keys, wanted("hidden_size")?, wanted("num_attention_heads")?)?,
        model => {
            heads_apart(&keys, wanted("hidden_size")?, wanted("num_attention_heads")?, model == "qwen3_moe")?
        }
    };
    let dense = keys.given("first_k_dense_replace").and_then(Value::as_u64).unwrap_or(0);
    let whole = |key: &str| keys.given(key).is_some_and(Value::is_u64);
    let mla = whole("qk_rope_head_dim") && whole("kv_lora_rank");
    let count = |key: &str, or| keys.given(key).and_then(Value::as_u64).unwrap_or(or);
    let kv = count("num_key_value_heads", 0);
    let gqa = kv > 0 && kv != count("num_attention_heads", 1);
    let (name, kind) = match model {
        "deepseek_v3" => ("DeepseekV3ForCausalLM", "mla"),
        "qwen3_moe" => ("Qwen3MoeForCausalLM", "moe"),
        _ => ("Qwen3ForCausalLM", "dense"),
    };
    Ok(json!({
        "model_name": name, "model_type": kind, "config": config,
        "kv_cache_type": if mla { "mla" } else if gqa { "gqa" } else { "mha" },
        "has_moe": count("num_experts", 0) > 0 || count("n_routed_experts", 0) > 0, "has_mla": mla,
        "has_dense_layers": dense > 0, "first_k_dense_replace": dense,
        "nodes": nodes.iter().map(|n| n.json(layers)).collect::<Vec<_>>(),
    }))
}

impl Node<'_> {
    fn json(&self, layers: u64) -> Value {
        let [input, output] = self.widths;
        let weight = if self.attention.is_some() { [0, 0] } else { self.widths };
        json!({
            "name": self.name, "op_type": if self.attention.is_some() { "attention" } else { "matmul" },
            "input_shape": ["seq_len", input], "output_shape": ["seq_len", output], "weight_shape": weight,
            "dtype": "FP16", "parallel_strategy": {"tp_dim": self.tp, "ep_size": 1, "replicated": self.replicated},
            "num_layers": layers, "extra_attrs": self.extra, "attention_type": self.attention,
        })
    }
}

/// A product whose ranks hold columns of the weight (1) or rows (0).
fn product<'a>(name: &'a str, widths: [u64; 2], tp: u64, extra: Value) -> Node<'a> {
    Node { name, widths, attention: None, tp: Some(tp), replicated: false, extra }
}

fn attention<'a>(name: &'a str, widths: [u64; 2], kind: &'a str, extra: Value) -> Node<'a> {
    Node { name, widths, attention: Some(kind), tp: None, replicated: false, extra }
}

/// The gate, the routed experts, the shared one.
fn experts(nodes: &mut Vec<Node>, hidden: u64, [experts, top, inner, shared]: [u64; 4]) {
    let extra = json!({"is_moe": true, "is_gate": true, "top_k": top});
    let gate = Node { replicated: true, ..product("moe_gate", [hidden, experts], 0, extra) };
    nodes.push(Node { tp: None, ..gate });
    let extra = || json!({"is_moe": true, "is_expert": true, "num_experts": experts, "top_k": top});
    nodes.push(product("moe_up_proj", [hidden, 2 * inner], 1, extra()));
    nodes.push(product("moe_down_proj", [inner, hidden], 0, extra()));
    if shared > 0 {
        let extra = || json!({"is_moe": true, "is_shared_expert": true});
        nodes.push(product("shared_expert_up_proj", [hidden, 2 * shared], 1, extra()));
        nodes.push(product("shared_expert_down_proj", [shared, hidden], 0, extra()));
    }
}

fn heads_apart<'a>(keys: &Keys, hidden: u64, heads: u64, moe: bool) -> Result<Vec<Node<'a>>, Refused> {
    let kv = keys.count("num_key_value_heads", heads)?;
    let head = keys.count("head_dim", (hidden / heads).max(1))?;
    let (all, q) = ((heads + 2 * kv) * head, heads * head);
    let kind = if kv == heads { "mha" } else { "gqa" };
    let mut nodes = vec![
        product("qkv_proj", [hidden, all], 1, json!({"is_attention": true, "is_qkv": true})),
        attention("attention", [all, q], kind, json!({"num_heads": heads, "kv_heads": kv, "head_dim": head})),
        product("o_proj", [q, hidden], 0, json!({"is_attention": true, "is_o_proj": true})),
    ];
    if !moe {
        let inner = keys.count("intermediate_size", 1)?;
        nodes.push(product(
            "gate_up_proj",
            [hidden, 2 * inner],
            1,
            json!({"is_ffn": true, "is_gate_up": true}),
        ));
        nodes.push(product("down_proj", [inner, hidden], 0, json!({"is_ffn": true, "is_down": true})));
        return Ok(nodes);
    }
    let shared = keys.given("shared_expert_intermediate_size").and_then(Value::as_u64).unwrap_or(0);
    let inner = keys.count("moe_intermediate_size", keys.count("intermediate_size", 1)?)?;
    let sizes = [keys.count("num_experts", 1)?, keys.count("num_experts_per_tok", 4)?, inner, shared];
    experts(&mut nodes, hidden, sizes);
    Ok(nodes)
}

fn latent<'a>(keys: &Keys, hidden: u64, heads: u64) -> Result<Vec<Node<'a>>, Refused> {
    let [rope, rank] = [keys.count("qk_rope_head_dim", 64)?, keys.count("kv_lora_rank", 512)?];
    let [q_rank, value] = [keys.count("q_lora_rank", 1536)?, keys.count("v_head_dim", 128)?];
    let nope = keys.count("qk_nope_head_dim", 128)?;
    let of = |part: &str| {
        let mut extra =
            Map::from_iter([("is_attention".to_string(), json!(true)), ("is_mla".to_string(), json!(true))]);
        extra.insert(part.to_string(), json!(true));
        Value::Object(extra)
    };
    let sizes = json!({
        "num_heads": heads, "kv_lora_rank": rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": nope, "v_head_dim": value,
    });
    let mut nodes = vec![
        product("mla_q_proj", [hidden, q_rank], 1, of("is_q")),
        product("mla_q_up_proj", [q_rank, heads * (nope + rope)], 1, of("is_q_up")),
        product("mla_kv_proj", [hidden, rank + rope], 1, of("is_kv_compress")),
        attention("mla_attention", [hidden, heads * value], "mla", sizes),
        product("mla_o_proj", [heads * value, hidden], 0, of("is_o_proj")),
    ];
    let inner = keys.count("moe_intermediate_size", 2048)?;
    let shared = inner * keys.given("n_shared_experts").map_or(Some(1), Value::as_u64).unwrap_or(1);
    let sizes = [keys.count("n_routed_experts", 256)?, keys.count("num_experts_per_tok", 8)?, inner, shared];
    experts(&mut nodes, hidden, sizes);
    Ok(nodes)
}

/// True for the JSON of such a graph.
pub fn is_graph(value: &Value) -> bool {
    ["model_name", "model_type", "config", "nodes"].iter().all(|key| value.get(key).is_some())
}

/// Checks a graph as its `from_dict` and `validate` would read it, and gives the configuration that it was built from.
///
/// # Errors
/// One line that names the key.
pub fn read(value: &Value) -> Result<&Value, Refused> {
    let nodes = value.get("nodes").and_then(Value::as_array).ok_or("nodes must be a list")?;
    let mut names: Vec<&str> = Vec::new();
    for (i, node) in nodes.iter().enumerate() {
        let at = |key: &str| format!("nodes[{i}].{key}");
        let text = |key: &str| {
            node.get(key).and_then(Value::as_str).ok_or_else(|| format!("{} must be a text", at(key)))
        };
        let name = text("name")?;
        if name.is_empty() || names.contains(&name) {
            return Err(format!(
                "{}: `{}` is empty or given twice",
                at("name"),
                astrai_files::one_line(name)
            ));
        }
        names.push(name);
        text("op_type")?;
        text("dtype")?;
        for key in ["input_shape", "output_shape", "weight_shape"] {
            let dims = node.get(key).and_then(Value::as_array);
            let size = |d: &Value| d.is_u64() || d.as_str().is_some_and(|s| !s.is_empty());
            if !dims.is_some_and(|d| d.len() == 2 && d.iter().all(size)) {
                return Err(format!("{} must be a pair of sizes or symbols", at(key)));
            }
        }
        let strategy = node.get("parallel_strategy").and_then(Value::as_object);
        if !strategy
            .is_some_and(|s| ["tp_dim", "ep_size", "replicated"].iter().all(|key| s.contains_key(*key)))
        {
            return Err(format!("{} must have tp_dim, ep_size, replicated", at("parallel_strategy")));
        }
    }
    if !nodes.iter().any(|n| n["op_type"] == "attention") {
        return Err("nodes: there is no attention".into());
    }
    match value.get("config").filter(|c| c.is_object()) {
        Some(config) => Ok(config),
        None => Err("config must be an object".into()),
    }
}
