//! LLMSim's hand-written models. In: a `config.json`, a schedule. Out: its operators in the order in which it reports them: products,
//! attention, transfers. Sizes that do not divide are refused, as it asserts them.

use super::formulas::{Number, Row, What};
use super::{Keys, Schedule};
use crate::Refused;
use Number::{Fp16, Fp32, Int8};
use serde_json::Value;

/// The sizes that its formulas read.
pub struct Model {
    kind: Kind,
    hidden: u64,
    layers: u64,
    heads: u64,
    kv_heads: u64,
    intermediate: u64,
}

enum Kind {
    /// `SimpleTransformerArch`: qwen3. It would take whatever it does not know for one, too.
    Dense { head: u64 },
    /// `Qwen3MoEArch`.
    Experts { head: u64, experts: u64, top: u64, inner: u64 },
    /// `DeepSeekV3Arch`.
    Latent(Latent),
}

struct Latent {
    q_rank: u64,
    rank: u64,
    nope: u64,
    rope: u64,
    value: u64,
    dense: u64,
    experts: u64,
    top: u64,
    inner: u64,
}

/// Refuses what does not divide.
fn divides(key: &str, n: u64, by: &str, d: u64) -> Result<u64, Refused> {
    match n.is_multiple_of(d) {
        true => Ok(n / d),
        false => Err(format!("{key} {n} does not divide by {by} {d}")),
    }
}

/// Rows while they are listed: products first, attention and transfers behind them.
struct Rows<'a> {
    s: &'a Schedule,
    products: Vec<Row>,
    attention: Vec<Row>,
    transfers: Vec<Row>,
}

const INT8: [Number; 3] = [Int8, Fp16, Int8];

impl Rows<'_> {
    fn product(&mut self, name: &'static str, [n, k]: [u64; 2], layers: u64, types: [Number; 3]) {
        self.batched(name, [self.s.rows(), n, k, 1], layers, types);
    }

    fn batched(&mut self, name: &'static str, mnkb: [u64; 4], layers: u64, types: [Number; 3]) {
        self.products.push(Row::new(name, What::Matmul, mnkb, layers, types));
    }

    fn attend(&mut self, name: &'static str, [n, k, batch]: [u64; 3], layers: u64) {
        let row = Row::new(name, What::Attention, [self.s.rows(), n, k, batch], layers, [Fp16; 3]);
        self.attention.push(row);
    }

    fn send(
        &mut self,
        name: &'static str,
        gb_s: f64,
        [m, k, batch]: [u64; 3],
        layers: u64,
        types: [Number; 3],
    ) {
        self.transfers.push(Row::new(name, What::Transfer(gb_s), [m, 0, k, batch], layers, types));
    }

    /// Over the ranks of `tp`, where there are several.
    fn all_reduce(&mut self, name: &'static str, hidden: u64, layers: u64) {
        if self.s.tp > 1 {
            let gb_s = if self.s.decode { 22.64 } else { 85.0 };
            self.send(name, gb_s, [self.s.rows(), hidden, 1], layers, [Fp16; 3]);
        }
    }
}

impl Model {
    /// Reads the keys that it reads, with its defaults.
    pub fn parse(config: &Value) -> Result<Model, Refused> {
        let keys = Keys { at: "config", fields: config.as_object().ok_or("config must be an object")? };
        let [hidden, heads] = [keys.count("hidden_size", 4096)?, keys.count("num_attention_heads", 32)?];
        let head = |default| keys.count("head_dim", default);
        let kind = match config.get("model_type").and_then(Value::as_str).unwrap_or_default() {
            "deepseek_v3" | "deepseek_r1" => Kind::Latent(Latent {
                q_rank: keys.count("q_lora_rank", 1536)?,
                rank: keys.count("kv_lora_rank", 512)?,
                nope: keys.count("qk_nope_head_dim", 128)?,
                rope: keys.count("qk_rope_head_dim", 64)?,
                value: keys.count("v_head_dim", 128)?,
                dense: match config.get("first_k_dense_replace").and_then(Value::as_u64) {
                    Some(0) => 0,
                    _ => keys.count("first_k_dense_replace", 3)?,
                },
                experts: keys.count("n_routed_experts", 256)?,
                top: keys.count("num_experts_per_tok", 8)?,
                inner: keys.count("moe_intermediate_size", 2048)?,
            }),
            "qwen3_moe" => Kind::Experts {
                head: head(128)?,
                experts: keys.count("num_experts", 128)?,
                top: keys.count("num_experts_per_tok", 8)?,
                inner: keys.count("moe_intermediate_size", 1536)?,
            },
            "qwen3" => Kind::Dense { head: head(128)? },
            other => {
                let (other, known) = (astrai_files::one_line(other), super::graph::MODELS.join(", "));
                return Err(format!(
                    "model_type: LLMSim has no builder of `{other}`; it has those of {known}"
                ));
            }
        };
        Ok(Model {
            kind,
            hidden,
            heads,
            layers: keys.count("num_hidden_layers", 32)?,
            kv_heads: keys.count("num_key_value_heads", 8)?,
            intermediate: keys.count("intermediate_size", 11008)?,
        })
    }

    /// Bytes of keys and values of a token: a device's, in all.
    pub fn kv_bytes(&self, s: &Schedule) -> [u64; 2] {
        match &self.kind {
            Kind::Latent(l) => [self.layers * (l.rank + l.rope); 2],
            _ => {
                let all =
                    2 * u128::from(self.layers) * u128::from(self.kv_heads) * u128::from(self.hidden) * 2;
                let all = u64::try_from(all).unwrap_or(u64::MAX);
                [all / s.tp, all]
            }
        }
    }

    /// The operators of a schedule.
    pub fn rows(&self, s: &Schedule) -> Result<Vec<Row>, Refused> {
        let mut rows = Rows { s, products: vec![], attention: vec![], transfers: vec![] };
        let mtp = u64::from(s.mtp);
        match &self.kind {
            Kind::Dense { head } => {
                self.heads_apart(&mut rows, *head, self.layers)?;
                let inner = divides("intermediate_size", self.intermediate, "tp", s.tp)?;
                rows.product("dense_gate_up_proj", [2 * inner, self.hidden], self.layers, [Fp16; 3]);
                rows.product("dense_down_proj", [self.hidden, inner], self.layers, [Fp16; 3]);
                rows.all_reduce("dense_all_reduce", self.hidden, self.layers);
            }
            Kind::Experts { head, experts, top, inner } => {
                let layers = self.layers + mtp;
                self.heads_apart(&mut rows, *head, layers)?;
                self.experts(&mut rows, [*experts, *top, *inner], layers)?;
                if s.deepep {
                    let gb_s = if s.decode { [18.58, 22.64] } else { [100.0; 2] };
                    let size = [s.rows(), self.hidden, 1];
                    rows.send("dispatch", gb_s[0], size, layers, [Fp32, Fp32, Fp16]);
                    rows.send("combine", gb_s[1], size, layers, [Fp32, Fp32, Fp16]);
                }
            }
            Kind::Latent(l) => self.latent(&mut rows, l, mtp)?,
        }
        let Rows { mut products, attention, transfers, .. } = rows;
        products.extend(attention);
        products.extend(transfers);
        Ok(products)
    }

    /// Attention with keys of their own.
    fn heads_apart(&self, rows: &mut Rows, head: u64, layers: u64) -> Result<(), Refused> {
        let s = rows.s;
        let q = divides("num_attention_heads", self.heads, "tp", s.tp)?;
        match self.kv_heads > s.tp {
            true => divides("num_key_value_heads", self.kv_heads, "tp", s.tp)?,
            false => divides("tp", s.tp, "num_key_value_heads", self.kv_heads)?,
        };
        let kv = (self.kv_heads / s.tp).max(1);
        rows.product("qkv_proj", [(q + 2 * kv) * head, self.hidden], layers, [Fp16; 3]);
        rows.product("o_proj", [self.hidden, q * head], layers, [Fp16; 3]);
        rows.all_reduce("attn_all_reduce", self.hidden, layers);
        rows.attend("qk", [s.seq, head, q], layers);
        rows.attend("qkv", [head, s.seq, kv], layers);
        Ok(())
    }

    /// The gate and the routed experts.
    fn experts(&self, rows: &mut Rows, [experts, top, inner]: [u64; 3], layers: u64) -> Result<(), Refused> {
        let s = rows.s;
        let here = divides("the number of experts", experts, "ep", s.ep)?;
        let routed = s.rows() / s.tp * top;
        let m =
            divides("tokens of a rank times num_experts_per_tok", routed, "the experts of a rank,", here)?;
        rows.product("moe_gate", [experts, self.hidden], layers, [Fp32; 3]);
        rows.batched("moe_up", [m, 2 * inner, self.hidden, here], layers, INT8);
        rows.batched("moe_down", [m, self.hidden, inner, here], layers, INT8);
        Ok(())
    }

    /// DeepSeek's latent attention, dense layers and experts.
    fn latent(&self, rows: &mut Rows, l: &Latent, mtp: u64) -> Result<(), Refused> {
        let (s, hidden) = (rows.s, self.hidden);
        let layers = self.layers + mtp;
        let heads = divides("num_attention_heads", self.heads, "tp", s.tp)?;
        rows.product("q_a_kv_a", [l.q_rank + l.rank + l.rope, hidden], layers, INT8);
        rows.product("q_b", [heads * (l.nope + l.rope), l.q_rank], layers, INT8);
        if s.decode {
            rows.batched("q_absorb", [s.rows(), l.rank, l.nope, heads], layers, [Fp32; 3]);
            rows.batched("o_absorb", [s.rows(), l.value, l.rank, heads], layers, [Fp32; 3]);
        } else {
            rows.product("kv_b", [heads * (l.value + l.nope), l.rank], layers, INT8);
        }
        rows.product("o_proj", [hidden, heads * l.value], layers, INT8);
        rows.all_reduce("attn_all_reduce", hidden, layers);
        rows.attend("qk_nope", [s.seq, l.nope, heads], layers);
        rows.attend("qk_rope", [s.seq, l.rope, heads], layers);
        rows.attend("qkv", [l.value, s.seq, heads], layers);
        let inner = divides("intermediate_size", self.intermediate, "tp", s.tp)?;
        let inner = if s.dense_dp { self.intermediate } else { inner };
        rows.product("dense_gate_up_proj", [2 * inner, hidden], l.dense, INT8);
        rows.product("dense_down_proj", [hidden, inner], l.dense, INT8);
        if !s.dense_dp {
            rows.all_reduce("dense_all_reduce", hidden, l.dense);
        }
        let layers = (self.layers + mtp).checked_sub(l.dense).ok_or_else(|| {
            format!("first_k_dense_replace {} is more than num_hidden_layers {}", l.dense, self.layers)
        })?;
        self.experts(rows, [l.experts, l.top, l.inner], layers)?;
        let shared = if s.deepep { l.inner } else { l.inner / s.tp };
        rows.product("share_up", [2 * shared, hidden], layers, INT8);
        rows.product("share_down", [hidden, shared], layers, INT8);
        if s.deepep {
            let gb_s = if s.decode { [18.58, 22.64] } else { [85.0; 2] };
            let size = [s.rows() / s.tp, hidden, l.top];
            rows.send("dispatch", gb_s[0], size, layers, [Int8, Fp16, Fp16]);
            rows.send("combine", gb_s[1], size, layers, [Fp16; 3]);
        }
        Ok(())
    }
}
