//! Rope frequencies against values computed apart from this code, from the definitions in transformers.

use astrai_builders::config::{LongRope, RopeLayout, RopeScaling, RopeSpec, Yarn};

fn check(scaling: RopeScaling, theta: f64, dim: usize, expected: &[(usize, f64)]) -> RopeSpec {
    let rope = RopeSpec { theta, dim, layout: RopeLayout::Half, scaling };
    let freq = rope.inv_freq();
    assert_eq!(freq.len(), dim / 2);
    for &(j, x) in expected {
        assert!((freq[j] - x).abs() <= 1e-12 * x, "{j}: {} for {x}", freq[j]);
    }
    rope
}

fn yarn(factor: f64, original_max_positions: usize) -> Yarn {
    Yarn {
        factor,
        original_max_positions,
        attention_factor: None,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: None,
        mscale_all_dim: None,
        truncate: true,
    }
}

#[test]
fn plain_and_linear() {
    let rope = check(RopeScaling::None, 10000.0, 8, &[(0, 1.0), (1, 0.1), (2, 0.01), (3, 0.001)]);
    assert_eq!(rope.attention_factor(), 1.0);
    check(RopeScaling::Linear { factor: 4.0 }, 10000.0, 8, &[(0, 0.25), (1, 0.025), (3, 0.00025)]);
}

#[test]
fn ntk() {
    let values = [(0, 1.0), (1, 0.2594128170149228), (4, 0.004528618321319533), (7, 7.905694150420948e-05)];
    check(RopeScaling::Ntk { factor: 4.0 }, 10000.0, 16, &values);
}

#[test]
fn llama3() {
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192,
    };
    let values = [
        (0, 1.0),
        (1, 0.8146172338565447),
        (20, 0.016560440080994446),
        (29, 0.002166570763503359),
        (32, 0.0005248461609929547),
        (35, 9.556212353964683e-05),
        (63, 3.068925988914511e-07),
    ];
    check(scaling, 500000.0, 128, &values);
}

#[test]
fn yarn_truncated_and_not() {
    let values = [
        (0, 1.0),
        (20, 0.01333521432163324),
        (30, 0.0010643609812470017),
        (35, 0.0002462584069089387),
        (40, 4.445698525097307e-05),
        (50, 5.133812566142866e-06),
        (63, 3.102344401879299e-07),
    ];
    let rope = check(RopeScaling::Yarn(yarn(4.0, 32768)), 1e6, 128, &values);
    assert!((rope.attention_factor() - 1.138629436111989).abs() < 1e-14);
    let values = [
        (8, 0.050813274815461475),
        (10, 0.019335001126540362),
        (14, 0.0020937923789696887),
        (18, 3.8308812373753384e-05),
        (31, 3.0235114281192144e-07),
    ];
    check(RopeScaling::Yarn(Yarn { truncate: false, ..yarn(32.0, 4096) }), 150000.0, 64, &values);
}

#[test]
fn yarn_attention_factor() {
    let factor = |y: Yarn| {
        RopeSpec { theta: 1e4, dim: 8, layout: RopeLayout::Half, scaling: RopeScaling::Yarn(y) }
            .attention_factor()
    };
    let scales = Yarn { mscale: Some(0.707), mscale_all_dim: Some(1.0), ..yarn(40.0, 4096) };
    assert!((factor(scales.clone()) - 0.9210423553163399).abs() < 1e-14);
    assert_eq!(factor(Yarn { attention_factor: Some(1.5), ..scales }), 1.5);
    assert_eq!(factor(yarn(1.0, 4096)), 1.0);
}

/// Values of transformers' own function in f32.
#[test]
fn longrope_turns_by_the_context_it_is_built_for() {
    let l = LongRope {
        short: (0..8).map(|i| 1.0 + 0.25 * f64::from(i)).collect(),
        long: (0..8).map(|i| 2.0 + f64::from(i * i)).collect(),
        original_max_positions: 4096,
        max_positions: 131_072,
        factor: None,
        attention_factor: None,
    };
    let of = |l: LongRope| RopeSpec {
        theta: 1e4,
        dim: 16,
        layout: RopeLayout::Half,
        scaling: RopeScaling::LongRope(l),
    };
    let rope = of(l.clone());
    let near = |got: f64, want: f64| assert!((got - want).abs() <= 1e-7 * want, "{got} for {want}");
    for span in [1, 4096] {
        let freq = rope.inv_freq_within(span);
        near(freq[0], 1.0);
        near(freq[3], 0.01807015761733055);
        near(freq[7], 0.00011499191168695688);
    }
    let freq = rope.inv_freq_within(4097);
    near(freq[0], 0.5);
    near(freq[3], 0.002874797908589244);
    near(freq[7], 6.200544703460764e-6);
    near(rope.attention_factor(), 1.1902380714238083);
    near(of(LongRope { attention_factor: Some(1.5), ..l.clone() }).attention_factor(), 1.5);
    near(of(LongRope { factor: Some(1.0), ..l }).attention_factor(), 1.0);
}
