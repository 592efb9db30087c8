//! The tables: how many, of what, how far off; and tables that are wrong.

use super::*;
use std::collections::BTreeSet;

#[test]
fn fitted_on_half_the_other_half_is_predicted() {
    let outcome = run().unwrap();
    let kinds: BTreeSet<&str> = outcome.rows.iter().map(|r| r.case.hardware.name.as_str()).collect();
    assert!(outcome.rows.len() >= 24 && kinds.len() >= 5, "{kinds:?}");
    for r in &outcome.rows {
        let half = if r.case.fitted { "fitted" } else { "tested" };
        println!("{half} {:6.1} %  {}", r.error() * 100.0, r.case.what);
    }
    let (median, worst) = outcome.tested();
    println!("tested: median {median:.3}, worst without a reason {worst:.3}");
    assert!(median <= 0.15 && worst <= 0.40, "median {median}, worst {worst}");
    let numbers = &outcome.fitted.kernels;
    assert!(numbers.reach.iter().all(|r| r.compute <= 1.0 && r.memory <= 1.0), "{numbers:?}");
}

#[test]
fn a_wrong_table_is_refused_in_one_line() {
    let good = "[[measurement]]\nwhat = 'x'\nsource = 'y'\nhardware = 'h200'\nengine = 'kernel'\nquantity = 'us'\nvalue = 1.0\nkernel = {form = 'dot', m = 8, n = 8, k = 8}\n";
    assert_eq!(read(good, "x.toml").unwrap().len(), 1);
    for (from, to, part) in [
        ("h200", "h2000", "h2000"),
        ("'us'", "'hours'", "quantity"),
        ("value = 1.0", "value = -1.0", "value"),
        ("value = 1.0", "value = nan", "value"),
        ("form = 'dot'", "form = 'dott'", "kernel.form"),
        ("'kernel'", "'kernels'", "engine"),
        ("source", "sauce", "sauce"),
        ("kernel = {form = 'dot', m = 8, n = 8, k = 8}", "model = 'none'\nfor = 'decode'", "model"),
    ] {
        let line = read(&good.replacen(from, to, 1), "x.toml").unwrap_err();
        assert!(line.starts_with("x.toml: ") && line.contains(part) && !line.contains('\n'), "{line}");
    }
}
