//! `call`: a block run on its parameters.

use crate::op::{Infer, Inferred, Operator};
use crate::{BlockId, Tensor, eval::Eval, eval::Precision, eval::eval_borrowed};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Runs a block of the graph; the arguments bind its parameters in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Call {
    /// The block.
    pub block: BlockId,
    /// The layer: distinguishes calls of a block whose arguments are equal.
    pub layer: u32,
}

impl Operator for Call {
    const NAME: &'static str = "call";
    const FLOPS: usize = 0; // counted in the body

    fn infer(&self, cx: &Infer) -> Inferred {
        let signature = cx.graph.signature(self.block);
        let signature =
            signature.ok_or_else(|| format!("names block {}, which does not exist", self.block.0))?;
        let block = cx.graph.block(self.block);
        let params = signature.params.as_ref().map_err(|e| e.to_string())?;
        if params.len() != cx.args.len() {
            return Err(format!(
                "of `{}` takes {} arguments, got {}",
                block.name,
                params.len(),
                cx.args.len()
            ));
        }
        for ((name, want), got) in block.params.iter().zip(params).zip(cx.args) {
            if want != *got {
                return Err(format!("of `{}` wants {want} for `{name}`, got {got}", block.name));
            }
        }
        Ok(signature.outputs.clone())
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let block = cx.graph.block(self.block);
        let leaves: HashMap<&str, &Tensor> =
            block.params.iter().map(String::as_str).zip(cx.args.iter().copied()).collect();
        let outs = eval_borrowed(&block.graph, &leaves, cx.sizes, Precision { exact: cx.exact })
            .map_err(|e| e.to_string())?;
        Ok(outs.into_iter().map(|(_, t)| t).collect())
    }
}
