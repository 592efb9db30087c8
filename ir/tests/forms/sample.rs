//! Graphs that the tests write, read and break.

use astrai_ir::ops::*;
use astrai_ir::{Block, DType, Dim, Graph, IrError, NodeId, Real, Symbol, Tensor, Type};
use std::sync::Arc;

pub fn symbols() -> Vec<Symbol> {
    vec![
        Symbol { name: "tokens".into(), min: 1, max: 8192, multiple_of: 1 },
        Symbol { name: "sequences".into(), min: 8, max: 64, multiple_of: 8 },
    ]
}

pub fn tokens() -> Dim {
    Dim::symbol("tokens")
}

/// `x + rms_norm(x) · wᵀ`, with a block of its own for the sum.
pub fn layer() -> Block {
    let mut sum = Graph::new(symbols());
    let shape = vec![tokens(), Dim::from(8)];
    let a = sum.input("a", DType::F32, shape.clone()).unwrap();
    let b = sum.input("b", DType::F32, shape.clone()).unwrap();
    let y = sum.add(a, b).unwrap();
    sum.set_output("y", y).unwrap();
    let mut g = Graph::new(symbols());
    let residual = g.add_block(Arc::new(Block::new("residual", sum)));
    let x = g.input("x", DType::F32, shape).unwrap();
    let norm = g.weight("norm", DType::F32, &[8]).unwrap();
    let w = g.weight("w", DType::F32, &[8, 8]).unwrap();
    let n = g.scope("norm", |g| g.rms_norm(x, norm, 1e-6)).unwrap();
    let y = g.scope("proj", |g| g.linear(n, w)).unwrap();
    let y = g.push(Call { block: residual, layer: 0 }, &[x, y]).unwrap();
    g.set_output("y", y).unwrap();
    g.set_output("n", n).unwrap();
    Block::new("layer", g)
}

/// A graph with every kind of operator of the dense models.
pub fn every_op() -> Graph {
    let mut g = Graph::new(symbols());
    let ids = g.scope("ends", ends).unwrap();
    let ids = [ids, g.scope("attn", heads).unwrap(), calls(&mut g).unwrap()].concat();
    for (i, id) in ids.into_iter().enumerate() {
        g.set_output(&format!("out{i}"), id).unwrap();
    }
    g
}

fn ends(g: &mut Graph) -> Result<Vec<NodeId>, IrError> {
    let mut out = Vec::new();
    let wide = vec![tokens(), Dim::from(8)];
    let x = g.input("x", DType::F32, wide.clone())?;
    let i = g.input("i", DType::I32, vec![tokens()])?;
    let parts = ["q", "k"].map(|n| Rows { name: n.into(), rows: 4 }).to_vec();
    let ty = Type::new(DType::F32, [8, 8].map(Dim::from));
    let w = Weight { parts, ..Weight::new("qk", ty) };
    let w = g.push(w, &[])?;
    let s =
        g.push(State { name: "s".into(), ty: Type::new(DType::F32, [Dim::from(16), Dim::from(8)]) }, &[])?;
    let odd = Tensor::float(DType::BF16, &[4], vec![-0.0, f64::NAN, f64::INFINITY, 0.1]);
    out.push(g.push(Const::new(&odd), &[])?);
    out.push(g.push(Iota { ty: Type::new(DType::I64, [tokens(), Dim::from(2)]), axis: 0 }, &[])?);
    out.push(g.permute(x, &[1, 0])?);
    out.push(g.slice(x, 0, &tokens() - &Dim::from(1), Dim::from(1))?);
    let value = Real(f64::NEG_INFINITY);
    out.push(g.push(Pad { axis: 0, before: Dim::symbol("sequences"), after: Dim::from(0), value }, &[x])?);
    out.push(g.push(Concat { axis: 1 }, &[x, x])?);
    out.extend(
        UnaryKind::ALL
            .iter()
            .filter(|k| **k != UnaryKind::Not)
            .map(|&k| g.unary(k, x))
            .collect::<Result<Vec<_>, _>>()?,
    );
    let half = g.scale(x, 0.5)?;
    for kind in BinaryKind::ALL.into_iter().filter(|k| !matches!(k, BinaryKind::And | BinaryKind::Or)) {
        out.push(g.binary(kind, x, half)?);
    }
    let truth = CompareKind::ALL.map(|kind| g.compare(kind, x, half));
    out.push(g.select(truth[0].clone()?, x, half)?);
    out.push(g.binary(BinaryKind::And, truth[1].clone()?, truth[2].clone()?)?);
    out.push(g.cast(x, DType::F8E4M3)?);
    for kind in ReduceKind::ALL {
        out.push(g.reduce(kind, x, &[0, 1])?);
    }
    out.push(g.linear(x, w)?);
    let rows = g.gather(s, i, 0)?;
    out.push(g.push(Scatter { axis: 0, batch: 0, kind: ScatterKind::Add }, &[s, i, rows])?);
    out.push(g.push(Softmax { log: true }, &[x])?);
    out.push(g.push(GatedAct { act: Activation::GeluTanh }, &[x, half])?);
    Ok(out)
}

fn heads(g: &mut Graph) -> Result<Vec<NodeId>, IrError> {
    let q = g.input("q", DType::F32, vec![tokens(), Dim::from(4), Dim::from(8)])?;
    let k = g.input("kv", DType::F32, vec![tokens(), Dim::from(2), Dim::from(8)])?;
    let starts = g.input("starts", DType::I32, vec![&Dim::symbol("sequences") + &Dim::from(1)])?;
    let table = g.input("table", DType::F32, vec![tokens(), Dim::from(3)])?;
    let q = g.push(Rope { layout: RopeLayout::Half, dim: 6 }, &[q, table, table])?;
    let attention = Attention {
        scale: Real(0.125),
        causal: true,
        window: Some(5),
        softcap: Some(Real(30.0)),
        sinks: false,
        span: tokens(),
        page: None,
    };
    let both = g.push(attention.clone(), &[q, k, k, starts])?;
    let (y, lse) = (g.part(both, 0)?, g.part(both, 1)?);
    let back = g.push(AttentionGrad { forward: attention }, &[q, k, k, starts, y, lse, y])?;
    Ok(vec![y, g.part(back, 2)?])
}

fn calls(g: &mut Graph) -> Result<Vec<NodeId>, IrError> {
    let block = g.add_block(Arc::new(layer()));
    let mut x = g.input("h", DType::F32, vec![tokens(), Dim::from(8)])?;
    let norm = g.weight("norm", DType::F32, &[8])?;
    for layer in 0..2 {
        let w = g.weight(&format!("layers.{layer}.w"), DType::F32, &[8, 8])?;
        let y = g.scope(&format!("layers.{layer}"), |g| g.push(Call { block, layer }, &[x, norm, w]))?;
        x = g.part(y, 0)?;
    }
    Ok(vec![x])
}
