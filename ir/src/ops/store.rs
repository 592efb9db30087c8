//! `store`: the next version of a state. Effects are values: the old version is not changed; the planner places both versions in
//! one buffer.

use crate::op::{Infer, Inferred, Operator, same};
use crate::shard::{Label, Propagate, ShardingRule};
use crate::{DType, Tensor, eval::Eval};
use serde::{Deserialize, Serialize};

/// `(state, value)`: `value` is the next version. `(state, rows, value)`: the state with row `rows[i]` of axis 0
/// replaced by `value[i]`, for `rows` i32 `[n]` and `value` `[n, …]`; row -1 is skipped (padding); of equal rows the last
/// wins.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Store {}

impl Operator for Store {
    const NAME: &'static str = "store";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let (state, want, value) = match cx.args {
            [state, value] => (*state, (*state).clone(), *value),
            [state, rows, value] => {
                let [n] = rows.shape.as_slice() else {
                    return Err(format!("wants rows as i32[n], got {rows}"));
                };
                if rows.dtype != DType::I32 || state.rank() == 0 {
                    return Err(format!("wants rows as i32[n] of a state with axes, got {rows} and {state}"));
                }
                let mut want = (*state).clone();
                want.shape[0] = n.clone();
                (*state, want, *value)
            }
            a => return Err(format!("takes 2 or 3 arguments, got {}", a.len())),
        };
        same("the value and its place in the state", value, &want)?;
        Ok(vec![state.clone()])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let whole = cx.args.len() == 2;
        let labels: Vec<Label> = (0..cx.args[0].rank()).map(|d| (whole || d > 0).then_some(d)).collect();
        let mut args = vec![labels.clone(); cx.args.len()];
        if !whole {
            args[1] = vec![None];
        }
        cx.labelled(&args, &[labels], &[])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let (state, rows, value) = match cx.args {
            [state, rows, value] => (*state, *rows, *value),
            [_, value] => return Ok(vec![(*value).clone()]),
            _ => return Err("takes 2 or 3 arguments".into()),
        };
        let (n, width) = (state.shape[0], state.shape[1..].iter().product::<usize>());
        let mut source: Vec<Option<usize>> = vec![None; n];
        for i in 0..rows.len() {
            match usize::try_from(rows.int_at(i)) {
                Ok(r) if r < n => source[r] = Some(i),
                _ if rows.int_at(i) == -1 => {}
                _ => return Err(format!("row {} is outside the {n} rows of the state", rows.int_at(i))),
            }
        }
        // Rows are gathered from the concatenation of state and value, so that 64-bit integers stay exact.
        let both = state.append(value);
        Ok(vec![both.gather_with(cx.shape(), |i| match source[i / width] {
            Some(from) => state.len() + from * width + i % width,
            None => i,
        })])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{apply, try_apply};

    #[test]
    fn rows_are_written_and_minus_one_is_skipped() {
        let state = Tensor::f32(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let rows = |v: Vec<i64>| Tensor::int(DType::I32, &[v.len()], v);
        let value = Tensor::f32(&[3, 2], &[7.0, 8.0, 9.0, 10.0, 11.0, 12.0]);
        let out = apply(Store {}, &[state.clone(), rows(vec![2, -1, 0]), value.clone()]);
        assert_eq!(out[0].reals(), [11.0, 12.0, 3.0, 4.0, 7.0, 8.0]);
        assert_eq!(apply(Store {}, &[state.clone(), value.clone()])[0], value);
        for bad in [3, -2] {
            let e = try_apply(Store {}, &[state.clone(), rows(vec![bad, 0, 1]), value.clone()]).unwrap_err();
            assert!(e.to_string().contains(&format!("row {bad} ")), "{e}");
        }
    }
}
