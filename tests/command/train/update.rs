//! One update by hand: AdamW and SGD with weight decay and a clip that bites, against their formulas in f64; and the loss along
//! the gradient against its finite difference.

use crate::train::engine::{ADAMW, batch, open, open_model, recipe, values};
use astrai_ir::DType;
use astrai_runtime::GRAD;
use astrai_train::engine::Engine;
use astrai_train::update::{EXP_AVG, EXP_AVG_SQ, MOMENTUM, Optimizer, Rule};

const DECAY: f64 = 0.1;
const CLIP: f64 = 0.05;
const LR: f64 = 1e-2;

/// A weight and its moments in f64.
#[derive(Clone)]
struct Hand {
    name: String,
    decay: f64,
    p: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
}

impl Hand {
    fn new(engine: &Engine, name: &str) -> Hand {
        let p = wide(values(engine, name));
        let rank = engine.buffers().shape(name).unwrap().1.len();
        let (m, v) = (vec![0.0; p.len()], vec![0.0; p.len()]);
        Hand { name: name.into(), decay: if rank > 1 { DECAY } else { 0.0 }, p, m, v }
    }

    /// Step `t`, from 1.
    fn adamw(&mut self, g: &[f64], t: i32) {
        let (b1, b2) = (0.9f64, 0.95f64);
        for i in 0..g.len() {
            self.m[i] = b1 * self.m[i] + (1.0 - b1) * g[i];
            self.v[i] = b2 * self.v[i] + (1.0 - b2) * g[i] * g[i];
            let mean = self.m[i] / (1.0 - b1.powi(t));
            let root = (self.v[i] / (1.0 - b2.powi(t))).sqrt();
            self.p[i] -= LR * (mean / (root + 1e-8) + self.decay * self.p[i]);
        }
    }

    fn sgd(&mut self, g: &[f64]) {
        for i in 0..g.len() {
            self.m[i] = 0.9 * self.m[i] + g[i] + self.decay * self.p[i];
            self.p[i] -= LR * self.m[i];
        }
    }
}

fn wide(values: Vec<f32>) -> Vec<f64> {
    values.into_iter().map(f64::from).collect()
}

fn close(engine: &Engine, name: &str, want: &[f64]) {
    let top = want.iter().fold(1e-6f64, |m, x| m.max(x.abs()));
    for (i, (got, want)) in values(engine, name).iter().zip(want).enumerate() {
        let off = (f64::from(*got) - want).abs();
        assert!(off <= 1e-6 * top, "{name}[{i}]: {got}, by hand {want}");
    }
}

#[test]
fn updates_are_their_formulas() {
    for rule in [ADAMW, Rule::Sgd { momentum: 0.9, nesterov: false }] {
        let optimizer = Optimizer::new(rule, DECAY, Some(CLIP));
        let mut r = recipe(DType::F32, optimizer.rule.clone());
        r.optimizer = optimizer;
        let mut engine = open(&r);
        let mut all: Vec<Hand> = engine.weights().iter().map(|w| Hand::new(&engine, &w.name)).collect();
        assert!(all.iter().any(|h| h.decay == 0.0) && all.iter().any(|h| h.decay > 0.0));
        for t in 1..=3 {
            let done = engine.step(&[batch(&[40, 29], t)], LR).unwrap();
            let mut grads: Vec<Vec<f64>> =
                all.iter().map(|h| wide(values(&engine, &format!("{GRAD}{}", h.name)))).collect();
            let norm = grads.iter().flatten().map(|g| g * g).sum::<f64>().sqrt();
            assert!((done.grad_norm - norm).abs() <= 1e-6 * norm, "{done:?}, by hand {norm}");
            assert!(norm > 2.0 * CLIP, "the clip does not bite: {norm}");
            grads.iter_mut().flatten().for_each(|g| *g *= CLIP / (norm + 1e-6));
            for (hand, g) in all.iter_mut().zip(&grads) {
                match r.optimizer.rule {
                    Rule::AdamW { .. } => hand.adamw(g, t),
                    _ => hand.sgd(g),
                }
                close(&engine, &hand.name, &hand.p);
                let moments = [EXP_AVG, EXP_AVG_SQ].map(|m| format!("{m}{}", hand.name));
                match r.optimizer.rule {
                    Rule::AdamW { .. } => {
                        close(&engine, &moments[0], &hand.m);
                        close(&engine, &moments[1], &hand.v);
                    }
                    _ => close(&engine, &format!("{MOMENTUM}{}", hand.name), &hand.m),
                }
                // Rounding is not to pile up: the next step starts where this one ended.
                hand.p = wide(values(&engine, &hand.name));
            }
        }
    }
}

#[test]
fn the_loss_falls_along_the_gradient_as_the_gradient_says() {
    let mut r = recipe(DType::F32, Rule::Sgd { momentum: 0.0, nesterov: false });
    (r.optimizer.weight_decay, r.optimizer.clip) = (0.0, None);
    let mut engine = open(&r);
    let batch = batch(&[40, 29], 1);
    let scored = |e: &mut Engine| {
        let (sum, count) = e.score(&batch).unwrap();
        sum / count as f64
    };
    // p - h·g, then p + h·g: the difference of the losses is 2·h·|g|².
    let h = 0.02;
    let ahead = engine.step(std::slice::from_ref(&batch), h).unwrap();
    let below = scored(&mut engine);
    for w in engine.weights() {
        let g = values(&engine, &format!("{GRAD}{}", w.name));
        let p = values(&engine, &w.name);
        let back: Vec<u8> =
            p.iter().zip(&g).flat_map(|(p, g)| (p + 2.0 * h as f32 * g).to_le_bytes()).collect();
        engine.buffers().write(&w.name, |bytes| bytes.copy_from_slice(&back)).unwrap();
    }
    let above = scored(&mut engine);
    let slope = (above - below) / (2.0 * h * ahead.grad_norm * ahead.grad_norm);
    println!("slope {slope}");
    assert!((slope - 1.0).abs() < 2e-3, "{slope}");
}

/// Six experts of which a token meets two.
const EXPERTS: &str = r#"{"model_type": "autoregressive_lm", "attn_type": "gqa", "ffn_type": "moe", "vocab_size": 320,
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "n_routed_experts": 6, "n_activated_experts": 2, "n_shared_experts": 1,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false}"#;

#[test]
fn experts_of_their_own_rest_where_no_token_met_them() {
    for rule in [ADAMW, Rule::Sgd { momentum: 0.9, nesterov: false }] {
        let states: &[&str] = match rule {
            Rule::AdamW { .. } => &["", EXP_AVG, EXP_AVG_SQ],
            _ => &["", MOMENTUM],
        };
        let mut engine = open_model(EXPERTS, &recipe(DType::F32, rule));
        let experts: Vec<_> = engine.weights().iter().filter(|w| w.skip_zero_grad).cloned().collect();
        assert_eq!(experts.len(), 4, "two products in each of two layers");
        engine.step(&[batch(&[40, 29], 1)], LR).unwrap(); // all experts have moments
        let read = |engine: &Engine| -> Vec<Vec<Vec<f32>>> {
            let states = |name: &str| states.iter().map(|s| values(engine, &format!("{s}{name}"))).collect();
            experts.iter().map(|w| states(&w.name)).collect()
        };
        let before = read(&engine);
        engine.step(&[batch(&[2], 2)], LR).unwrap(); // two tokens meet at most four
        let after = read(&engine);
        let (mut rested, mut moved) = (0, 0);
        for (i, w) in experts.iter().enumerate() {
            let grad = values(&engine, &format!("{GRAD}{}", w.name));
            let each = grad.len() / w.parts.len();
            for (part, grad) in grad.chunks(each).enumerate() {
                let met = grad.iter().any(|g| *g != 0.0);
                for (then, now) in before[i].iter().zip(&after[i]) {
                    let [then, now] = [then, now].map(|x| &x[part * each..(part + 1) * each]);
                    assert_eq!(then != now, met, "{} part {part}", w.name);
                }
                *if met { &mut moved } else { &mut rested } += 1;
            }
        }
        assert!(rested > 0 && moved > 0, "{rested} rested, {moved} moved");
    }
}
