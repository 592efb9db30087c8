//! Random small graphs on random meshes: the ranks' outputs, gathered, are those of the unsharded graph, forward and backward.

use super::{MeshSharding, shard};
use crate::{GRAD, Gradients, canonicalise, differentiate, differentiate_over};
use astrai_ir::eval::{Precision, Sizes};
use astrai_ir::ops::*;
use astrai_ir::shard::Shard;
use astrai_ir::{Axis, DType, Dim, Graph, Mesh, NodeId, Placement, Real, Tensor, eval, eval_ranks};
use std::collections::HashMap;

/// A small generator; the tests say the seed that failed.
struct Draw(u64);

impl Draw {
    fn next(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % n as u64) as usize
    }

    fn real(&mut self) -> f64 {
        self.next(2001) as f64 / 1000.0 - 1.0
    }

    fn tensor(&mut self, shape: &[usize]) -> Tensor {
        let n = shape.iter().product();
        Tensor::exact(DType::F32, shape, (0..n).map(|_| self.real()).collect())
    }
}

/// A graph of `[8, 4]`, `[4, 8]`, `[8]` and `[4, 2, 4]` values, with its weights.
struct Random {
    g: Graph,
    values: HashMap<String, Tensor>,
    pool: Vec<NodeId>,
}

impl Random {
    fn new(d: &mut Draw) -> Random {
        let mut r = Random { g: Graph::new(vec![]), values: HashMap::new(), pool: vec![] };
        for shape in [vec![8, 4], vec![4, 8], vec![4, 2, 4], vec![8, 8], vec![8]] {
            r.weight(d, &shape);
        }
        for _ in 0..12 {
            if let Some(made) = r.grow(d) {
                r.pool.push(made);
            }
        }
        let mut loss = None;
        let pool = r.pool.clone();
        for id in pool.iter().rev().take(5) {
            let square = r.g.mul(*id, *id).unwrap();
            let axes: Vec<usize> = (0..r.g.ty(square).rank()).collect();
            let sum = r.g.reduce(ReduceKind::Sum, square, &axes).unwrap();
            loss = Some(loss.map_or(sum, |l| r.g.add(l, sum).unwrap()));
        }
        r.g.set_output("loss", loss.unwrap()).unwrap();
        let last = *pool.last().unwrap();
        r.g.set_output("last", last).unwrap();
        r
    }

    fn weight(&mut self, d: &mut Draw, shape: &[usize]) -> NodeId {
        let name = format!("w{}", self.values.len());
        let id = self.g.weight(&name, DType::F32, shape).unwrap();
        self.values.insert(name, d.tensor(shape));
        self.pool.push(id);
        id
    }

    fn grow(&mut self, d: &mut Draw) -> Option<NodeId> {
        let x = self.pool[d.next(self.pool.len())];
        let shape: Vec<usize> = self.g.ty(x).shape.iter().filter_map(Dim::size).collect();
        let (rank, last) = (shape.len(), *shape.last()?);
        let g = &mut self.g;
        let made = match d.next(19) {
            0 => g.unary(UnaryKind::Sigmoid, x),
            1 | 2 => {
                let same: Vec<NodeId> =
                    self.pool.iter().copied().filter(|y| g.ty(*y).shape == g.ty(x).shape).collect();
                let y = same[d.next(same.len())];
                g.binary([BinaryKind::Add, BinaryKind::Mul, BinaryKind::Sub][d.next(3)], x, y)
            }
            3 | 4 if rank == 2 => {
                let w = self.weight(d, &[8, last]);
                self.g.linear(x, w)
            }
            5 if rank > 1 => {
                let mut axes: Vec<usize> = (0..rank).collect();
                axes.rotate_left(1);
                g.permute(x, &axes)
            }
            6 if shape == [4, 8] => g.reshape(x, [4, 2, 4].map(Dim::from).to_vec()),
            7 if shape == [4, 2, 4] => g.reshape(x, [8, 4].map(Dim::from).to_vec()),
            8 if shape == [8, 4] => g.reshape(x, [4, 8].map(Dim::from).to_vec()),
            9 if rank > 1 => g.reduce(ReduceKind::Sum, x, &[d.next(rank)]),
            10 if rank > 1 => g.reduce(ReduceKind::Mean, x, &[d.next(rank)]),
            11 => g.push(Softmax { log: false }, &[x]),
            12 => {
                let w = self.weight(d, &[last]);
                self.g.rms_norm(x, w, 0.125)
            }
            13 if last == 8 => g.slice(x, rank - 1, Dim::from(4), Dim::from(4)),
            14 if last == 4 => g.push(Concat { axis: rank - 1 }, &[x, x]),
            15 if shape == [8] => g.broadcast(x, &[4, 8].map(Dim::from)),
            16 if rank == 2 => {
                let index = Tensor::int(DType::I32, &[4], (0..4).map(|_| d.next(shape[0]) as i64).collect());
                let index = g.push(Const::new(&index), &[]).unwrap();
                g.gather(x, index, 0)
            }
            17 if rank == 2 => g.push(Dot { batch: vec![(0, 0)], contract: vec![(1, 1)] }, &[x, x]),
            18 if shape == [8, 8] => {
                let half = g.slice(x, 1, Dim::from(0), Dim::from(4)).unwrap();
                let other = g.slice(x, 1, Dim::from(4), Dim::from(4)).unwrap();
                g.push(GatedAct { act: Activation::Silu }, &[half, other])
            }
            _ => return None,
        };
        Some(made.unwrap())
    }
}

/// A random piece of a tensor, or all of it; of eights sometimes half of each half.
fn place(d: &mut Draw, shape: &[usize], axes: &[Axis]) -> Vec<(String, Placement)> {
    let mut left = shape.to_vec();
    let mut placed = Vec::new();
    for a in axes {
        let dim = d.next(shape.len() + 1);
        let mut p = Placement::Replicate;
        if dim < shape.len() && left[dim].is_multiple_of(a.size) && left[dim] / a.size > 0 {
            let halves = left[dim].is_multiple_of(2 * a.size) && d.next(3) == 0;
            let sections = if halves { vec![left[dim] / 2; 2] } else { vec![] };
            p = Placement::Shard(Shard { dim, sections });
            left[dim] /= a.size;
        }
        placed.push((a.name.clone(), p));
    }
    placed
}

/// What a rank holds of a tensor.
fn piece(x: &Tensor, placed: &[(String, Placement)], mesh: &Mesh, rank: usize) -> Tensor {
    let at = mesh.coordinates(rank);
    placed.iter().fold(x.clone(), |x, (name, p)| match p {
        Placement::Shard(shard) => {
            let i = mesh.axes.iter().position(|a| a.name == *name).unwrap();
            shard.slice(&x, at[i], mesh.axes[i].size)
        }
        _ => x,
    })
}

fn close(what: &str, got: &Tensor, want: &Tensor) {
    assert_eq!(got.shape, want.shape, "{what}");
    let most = want.reals().iter().fold(1.0f64, |m, x| m.max(x.abs()));
    for (a, b) in got.reals().iter().zip(want.reals()) {
        assert!((a - b).abs() <= 1e-9 * most, "{what}: {a} instead of {b}");
    }
}

#[test]
fn random_graphs_on_random_meshes_equal_the_whole() {
    let exact = Precision { exact: true };
    let mut communicating = 0;
    for seed in 0..400 {
        let mut d = Draw(seed * 7919 + 1);
        let r = Random::new(&mut d);
        let axes = match d.next(3) {
            0 => vec![Axis::new("tp", 2)],
            1 => vec![Axis::new("tp", 4)],
            _ => vec![Axis::new("a", 2), Axis::new("b", 2)],
        };
        let mesh = Mesh { axes };
        let leaves: HashMap<_, _> =
            r.values.iter().map(|(n, t)| (n.clone(), place(&mut d, &t.shape, &mesh.axes))).collect();
        let shards = MeshSharding { mesh: mesh.clone(), leaves, stage: 0, trained: true };
        let local = shard(&r.g, &shards).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{}", r.g));
        communicating += usize::from(local.nodes().iter().any(|n| n.op.collective_axes().is_some()));
        let whole = differentiate(&r.g, "loss", Gradients::default()).unwrap();
        let ranks = differentiate_over(&local, "loss", Gradients::default(), &[]).unwrap();
        let ranks = canonicalise(&ranks).unwrap();
        let want = eval(&whole, &r.values, &Sizes::new(), exact).unwrap();
        let of_rank = |rank| {
            let one = |(n, t): (&String, &Tensor)| (n.clone(), piece(t, &shards.leaves[n], &mesh, rank));
            r.values.iter().map(one).collect::<HashMap<_, _>>()
        };
        let given: Vec<HashMap<String, Tensor>> = (0..mesh.ranks()).map(of_rank).collect();
        let sizes = vec![Sizes::new(); mesh.ranks()];
        let got = eval_ranks(&ranks, &mesh, &given, &sizes, exact)
            .unwrap_or_else(|e| panic!("seed {seed}: {e}\n{local}"));
        for (rank, outs) in got.iter().enumerate() {
            for ((name, got), (_, want)) in outs.iter().zip(&want) {
                let want = match name.strip_prefix(GRAD) {
                    Some(weight) => piece(want, &shards.leaves[weight], &mesh, rank),
                    None => want.clone(),
                };
                close(&format!("seed {seed}, rank {rank}, {name}\n{}\n{local}", r.g), got, &want);
            }
        }
    }
    assert!(communicating > 300, "only {communicating} graphs needed other ranks");
}

/// The operators that the models' layers need beside those, each cut in every way that its rule knows.
#[test]
fn heads_matrices_of_groups_and_a_vocabulary_in_pieces() {
    let exact = Precision { exact: true };
    let mut d = Draw(5);
    let mut g = Graph::new(vec![]);
    let mut values = HashMap::new();
    let mut weight = |g: &mut Graph, name: &str, shape: &[usize]| {
        values.insert(name.to_string(), d.tensor(shape));
        g.weight(name, DType::F32, shape).unwrap()
    };
    let (q, k, v) =
        (weight(&mut g, "q", &[3, 4, 4]), weight(&mut g, "k", &[3, 2, 4]), weight(&mut g, "v", &[3, 2, 4]));
    let ints = |g: &mut Graph, v: &[i64]| {
        g.push(Const::new(&Tensor::int(DType::I32, &[v.len()], v.to_vec())), &[]).unwrap()
    };
    let starts = ints(&mut g, &[0, 2, 3]);
    let op = Attention {
        scale: Real(0.5),
        causal: true,
        window: None,
        softcap: None,
        sinks: false,
        span: Dim::from(3),
        page: None,
    };
    let attention = g.push(op, &[q, k, v, starts]).unwrap();
    let heads = g.part(attention, 0).unwrap();
    let x = g.reshape(heads, [3, 16].map(Dim::from).to_vec()).unwrap();
    let w_in = weight(&mut g, "in", &[3 * 8, 16]);
    let w_out = weight(&mut g, "out", &[3 * 6, 4]);
    let offsets = ints(&mut g, &[0, 1, 1, 3]);
    let both = g.push(GroupedDot { transposed: false }, &[x, w_in, offsets]).unwrap();
    let [gate, up] = [0, 4].map(|at| g.slice(both, 1, Dim::from(at), Dim::from(4)).unwrap());
    let h = g.push(GatedAct { act: Activation::Silu }, &[gate, up]).unwrap();
    let y = g.push(GroupedDot { transposed: false }, &[h, w_out, offsets]).unwrap();
    let head = weight(&mut g, "head", &[10, 6]);
    let targets = ints(&mut g, &[9, -1, 3]);
    let loss = LinearCrossEntropy { label_smoothing: Real(0.0), softcap: Some(Real(2.0)), statistics: false };
    let losses = g.push(loss, &[y, head, targets]).unwrap();
    let sum = g.reduce(ReduceKind::Sum, losses, &[0]).unwrap();
    g.set_output("loss", sum).unwrap();
    let sharded = |dim: usize, sections: &[usize]| Placement::Shard(Shard::sections(dim, sections.to_vec()));
    let rows = [4; 6];
    let table = [
        ("q", sharded(1, &[])),
        ("k", sharded(1, &[])),
        ("v", sharded(1, &[])),
        ("in", sharded(0, &rows)),
        ("out", sharded(1, &[])),
        ("head", sharded(0, &[])),
    ];
    let mesh = Mesh { axes: vec![Axis::new("tp", 2)] };
    let leaves = table.into_iter().map(|(n, p)| (n.to_string(), vec![("tp".to_string(), p)])).collect();
    let shards = MeshSharding { mesh: mesh.clone(), leaves, stage: 0, trained: true };
    let local = shard(&g, &shards).unwrap();
    // The grouped products meet once; the loss three times, forward.
    let count = |g: &Graph, name: &str| g.nodes().iter().filter(|n| n.op.name() == name).count();
    assert_eq!(["all_reduce", "all_gather", "all_to_all"].map(|n| count(&local, n)), [4, 1, 0], "{local}");
    let whole = differentiate(&g, "loss", Gradients::default()).unwrap();
    let ranks = differentiate(&local, "loss", Gradients::default()).unwrap();
    let want = eval(&whole, &values, &Sizes::new(), exact).unwrap();
    let of_rank = |rank| {
        values
            .iter()
            .map(|(n, t): (&String, &Tensor)| (n.clone(), piece(t, &shards.leaves[n], &mesh, rank)))
            .collect()
    };
    let given: Vec<HashMap<String, Tensor>> = (0..2).map(of_rank).collect();
    let got = eval_ranks(&ranks, &mesh, &given, &[Sizes::new(), Sizes::new()], exact).unwrap();
    for (rank, outs) in got.iter().enumerate() {
        for ((name, got), (_, want)) in outs.iter().zip(&want) {
            let want =
                name.strip_prefix(GRAD).map_or(want.clone(), |w| piece(want, &shards.leaves[w], &mesh, rank));
            close(&format!("rank {rank}, {name}"), got, &want);
        }
    }
    let odd = MeshSharding { mesh: Mesh { axes: vec![Axis::new("tp", 3)] }, ..shards };
    let e = shard(&g, &odd).unwrap_err().to_string();
    assert!(e.contains("does not divide by tp=3"), "{e}");
}

/// A row that all ranks hold is repeated by each for its own rows, and its gradient is that of all rows.
#[test]
fn what_is_repeated_for_a_piece_has_the_gradient_of_the_whole() {
    let exact = Precision { exact: true };
    let mut d = Draw(11);
    let mut g = Graph::new(vec![]);
    let [x, w] = [("x", &[4, 8][..]), ("w", &[8])].map(|(n, s)| g.weight(n, DType::F32, s).unwrap());
    let root = g.unary(UnaryKind::Sigmoid, w).unwrap();
    let y = g.mul(x, root).unwrap();
    let yy = g.mul(y, y).unwrap();
    let sum = g.reduce(ReduceKind::Sum, yy, &[0, 1]).unwrap();
    g.set_output("loss", sum).unwrap();
    let values: HashMap<String, Tensor> = [("x", d.tensor(&[4, 8])), ("w", d.tensor(&[8]))]
        .into_iter()
        .map(|(n, t)| (n.to_string(), t))
        .collect();
    let mesh = Mesh { axes: vec![Axis::new("tp", 2)] };
    let of = |p| vec![("tp".to_string(), p)];
    let leaves = HashMap::from([
        ("x".to_string(), of(Placement::Shard(Shard::of(0)))),
        ("w".to_string(), of(Placement::Replicate)),
    ]);
    let shards = MeshSharding { mesh: mesh.clone(), leaves, stage: 0, trained: true };
    let local = differentiate(&shard(&g, &shards).unwrap(), "loss", Gradients::default()).unwrap();
    let whole = differentiate(&g, "loss", Gradients::default()).unwrap();
    let want = eval(&whole, &values, &Sizes::new(), exact).unwrap();
    let of_rank =
        |rank| values.iter().map(|(n, t)| (n.clone(), piece(t, &shards.leaves[n], &mesh, rank))).collect();
    let given: Vec<HashMap<String, Tensor>> = (0..2).map(of_rank).collect();
    let got = eval_ranks(&local, &mesh, &given, &[Sizes::new(), Sizes::new()], exact).unwrap();
    for (rank, outs) in got.iter().enumerate() {
        for ((name, got), (_, want)) in outs.iter().zip(&want) {
            let want =
                name.strip_prefix(GRAD).map_or(want.clone(), |w| piece(want, &shards.leaves[w], &mesh, rank));
            close(&format!("rank {rank}, {name}"), got, &want);
        }
    }
}
