//! Instances of the rules of dots and of attention.

use super::*;

pub fn dot_of_scaled_rows(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (k, n) = (m.draw.size(), m.draw.size());
    let (x, r) = (m.rows(k), m.rows(1));
    let shape = m.g.ty(x).shape.clone();
    let r = m.expand(r, shape);
    let x = m.either(MUL, x, r);
    let y = m.linear(x, k, n);
    m.done(y)
}

pub fn scaled_rows_of_dot(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (k, n) = (m.draw.size(), m.draw.size());
    let (x, r) = (m.rows(k), m.rows(1));
    let y = m.linear(x, k, n);
    let shape = m.g.ty(y).shape.clone();
    let r = m.expand(r, shape);
    let y = m.either(MUL, y, r);
    m.done(y)
}

pub fn dot_of_product(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (k, n, rank) = (m.draw.size(), m.draw.size(), 2);
    let x = m.rows(k);
    // The product is [n, k] or [k, n]; either factor may lie transposed.
    let at = m.draw.below(2);
    let (rows, columns) = if at == 1 { (n, k) } else { (k, n) };
    let (ca, cb) = (m.draw.below(2), m.draw.below(2));
    let a = m.w(&if ca == 1 { [rows, rank] } else { [rank, rows] });
    let b = m.w(&if cb == 1 { [columns, rank] } else { [rank, columns] });
    let both = m.push(Dot { batch: vec![], contract: vec![(ca, cb)] }, &[a, b]);
    let y = m.dot(x, both, at);
    m.done(y)
}

pub fn dot_of_sum(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (k, n) = (m.draw.size(), m.draw.size());
    let x = m.rows(k);
    let (a, b) = (m.w(&[n, k]), m.w(&[n, k]));
    let w = m.g.add(a, b).unwrap();
    let y = m.dot(x, w, 1);
    m.done(y)
}

pub fn dot_of_scaled_weight(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (k, n) = (m.draw.size(), m.draw.size());
    let x = m.rows(k);
    let w = m.w(&[k, n]);
    let w = m.scaled(w, &[0.3, 2.0]);
    let y = m.dot(x, w, 0);
    m.done(y)
}

pub fn dot_of_dot(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (k, r, n) = (m.draw.size(), m.draw.size(), m.draw.size());
    let x = m.rows(k);
    let low = m.linear(x, k, r);
    let y = m.linear(low, r, n);
    m.done(y)
}

pub fn dots_added(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (k, n) = (m.draw.size(), m.draw.size());
    let x = m.rows(k);
    let (a, b) = (m.linear(x, k, n), m.linear(x, k, n));
    let y = m.g.add(a, b).unwrap();
    m.done(y)
}

pub fn scaled_dot(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (k, n) = (m.draw.size(), m.draw.size());
    let mut x = m.rows(k);
    let before = m.draw.below(2) == 0;
    if before {
        x = m.scaled(x, &[0.3, 2.0]);
    }
    let mut y = m.linear(x, k, n);
    if !before {
        y = m.scaled(y, &[0.3, 2.0]);
    }
    m.done(y)
}

pub fn dot_of_norm(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (k, n) = (m.draw.size(), m.draw.size());
    let (x, g) = (m.rows(k), m.w(&[k]));
    let mut x = m.g.rms_norm(x, g, 1e-5).unwrap();
    // In f64 nothing is rounded, with or without the casts that round in a program.
    if m.draw.below(2) == 0 {
        x = m.push(Cast { dtype: DType::BF16 }, &[x]);
        x = m.push(Cast { dtype: DType::F32 }, &[x]);
    }
    let y = m.linear(x, k, n);
    m.done(y)
}

pub fn dot_of_gather(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let w = m.w(&[7, 4]);
    let i = m.typed(DType::I32, vec![Dim::symbol("tokens")]);
    let rows = m.g.gather(w, i, 0).unwrap();
    let n = 2 + m.draw.below(3);
    let y = m.linear(rows, 4, n);
    m.done(y)
}

// attention

/// Plain attention over `tokens` rows with sinks or not; the second argument of the function that makes `k` and `v` says which.
fn attention(m: &mut Make, q: NodeId, k: NodeId, v: NodeId, heads: usize) -> NodeId {
    let sinks = m.draw.below(2) == 0;
    let op = Attention {
        scale: Real(m.draw.pick(&[0.5, 0.3])),
        causal: m.draw.below(2) == 0,
        window: None,
        softcap: m.draw.pick(&[None, Some(Real(3.0))]),
        sinks,
        span: Dim::symbol("tokens"),
        page: None,
    };
    let starts = m.typed(DType::I32, shape(&[2]));
    let mut args = vec![q, k, v, starts];
    if sinks {
        args.push(m.x(&[heads]));
    }
    m.push(op, &args)
}

fn heads(m: &mut Make, heads: usize, width: usize) -> NodeId {
    m.typed(DType::F32, vec![Dim::symbol("tokens"), heads.into(), width.into()])
}

fn result(mut m: Make, a: NodeId) -> Graph {
    let index = m.draw.below(2) as u32;
    let y = m.g.part(a, index).unwrap();
    m.done(y)
}

pub fn repeated_heads(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (kv, group, more) = (2, m.draw.size(), 1 + m.draw.below(2));
    let wide = |m: &mut Make, width: usize| {
        let x = heads(m, kv, width);
        let t = Dim::symbol("tokens");
        let sizes = |n: usize| vec![t.clone(), kv.into(), n.into(), width.into()];
        let x = m.push(Reshape { shape: sizes(1) }, &[x]);
        let x = m.expand(x, sizes(group));
        m.push(Reshape { shape: vec![t.clone(), (kv * group).into(), width.into()] }, &[x])
    };
    let (k, v) = (wide(&mut m, 3), wide(&mut m, 2));
    let count = kv * group * more;
    let q = heads(&mut m, count, 3);
    let a = attention(&mut m, q, k, v, count);
    result(m, a)
}

pub fn attention_of_scaled_query(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (q, k, v) = (heads(&mut m, 4, 3), heads(&mut m, 2, 3), heads(&mut m, 2, 2));
    let f = m.draw.pick(&[0.25, 1.5]);
    let q = m.g.scale(q, f).unwrap();
    let a = attention(&mut m, q, k, v, 4);
    result(m, a)
}

pub fn latent_attention(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (h, nope, rope, dv, latent) = (m.draw.size(), m.draw.size(), 2, m.draw.size(), m.draw.size());
    let t = Dim::symbol("tokens");
    let (q, c, kr) = (heads(&mut m, h, nope + rope), m.rows(latent), m.rows(rope));
    let (k, v) = (m.linear(c, latent, h * nope), m.linear(c, latent, h * dv));
    let apart = |m: &mut Make, x: NodeId, n: usize| {
        m.push(Reshape { shape: vec![t.clone(), h.into(), n.into()] }, &[x])
    };
    let (k, v) = (apart(&mut m, k, nope), apart(&mut m, v, dv));
    let kr = m.push(Reshape { shape: vec![t.clone(), 1.into(), rope.into()] }, &[kr]);
    let kr = m.expand(kr, vec![t.clone(), h.into(), rope.into()]);
    let k = m.push(Concat { axis: 2 }, &[k, kr]);
    let a = attention(&mut m, q, k, v, h);
    result(m, a)
}

pub fn joint_latent_attention(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (h, nope, rope, dv, latent) = (m.draw.size(), m.draw.size(), 2, m.draw.size(), m.draw.size());
    let t = Dim::symbol("tokens");
    let (q, c, kr) = (heads(&mut m, h, nope + rope), m.rows(latent), heads(&mut m, 1, rope));
    let both = m.linear(c, latent, h * (nope + dv));
    let both = m.push(Reshape { shape: vec![t.clone(), h.into(), (nope + dv).into()] }, &[both]);
    let cut = |start: usize, len: usize| Slice { axis: 2, start: start.into(), len: len.into() };
    let (k, v) = (m.push(cut(0, nope), &[both]), m.push(cut(nope, dv), &[both]));
    let kr = m.expand(kr, vec![t, h.into(), rope.into()]);
    let k = m.push(Concat { axis: 2 }, &[k, kr]);
    let a = attention(&mut m, q, k, v, h);
    result(m, a)
}

/// Three pages of two rows, four of them listed, and seven keys.
pub fn attention_over_gathered_pages(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (page, all, listed, rope, latent) = (2, 3, 4, 2, m.draw.size());
    let width = latent + rope;
    let q = heads(&mut m, 3, width);
    let narrow = m.draw.below(2) == 1;
    let x = m.typed(if narrow { DType::BF16 } else { DType::F32 }, shape(&[all * page, 1, width]));
    let list = m.typed(DType::I32, shape(&[listed]));
    let x = m.push(Reshape { shape: shape(&[all, page, width]) }, &[x]);
    let x = m.push(Gather { axis: 0, batch: 0 }, &[x, list]);
    let x = if narrow { m.push(Cast { dtype: DType::F32 }, &[x]) } else { x };
    let k = m.push(Reshape { shape: shape(&[listed * page, 1, width]) }, &[x]);
    let v = m.push(Slice { axis: 2, start: 0.into(), len: latent.into() }, &[k]);
    let (starts, tables) = (m.typed(DType::I32, shape(&[2])), m.typed(DType::I32, shape(&[1, listed])));
    let lens = m.push(Const::new(&astrai_ir::Tensor::int(DType::I32, &[1], vec![7])), &[]);
    let op = Attention {
        scale: Real(0.7),
        causal: m.draw.below(2) == 0,
        window: None,
        softcap: None,
        sinks: false,
        span: Dim::from(8),
        page: Some(page),
    };
    let a = m.push(op, &[q, k, v, starts, tables, lens]);
    result(m, a)
}
