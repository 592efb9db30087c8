//! How far kernels reach a machine's peaks: a few numbers for each archetype, fitted to measurements and kept in the hardware's file.

use serde_json::{Map, Value, json};

/// Archetypes that have numbers of their own, by the names of their forms; the others take those of `loops`.
pub const ARCHETYPES: [&str; 7] =
    ["dot", "grouped", "attention", "attention_grad", "loss", "loops", "collective"];

/// What part of the peaks kernels of one archetype reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reach {
    /// Part of the peak of operations that large products reach, in (0, 1].
    pub compute: f64,
    /// Part of the bandwidth that large transfers reach, in (0, 1].
    pub memory: f64,
    /// Seconds of a kernel beside its operations and bytes: filling and draining, phases that wait for one another.
    pub fixed: f64,
}

impl Default for Reach {
    fn default() -> Reach {
        Reach { compute: 1.0, memory: 1.0, fixed: 0.0 }
    }
}

/// Numbers of all archetypes of a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernels {
    /// In the order of [`ARCHETYPES`].
    pub reach: [Reach; ARCHETYPES.len()],
    /// Seconds of a step that no kernel takes: the host's scheduling and sampling.
    pub step: f64,
    /// Root mean square of ln(predicted / measured) over what the numbers were fitted to; none where they are defaults.
    pub residual: Option<f64>,
}

impl Kernels {
    /// What kernels that are tuned for a GPU reach: measured by the sources of `kernels` in the presets.
    pub fn typical() -> Kernels {
        let of = |compute, memory, fixed| Reach { compute, memory, fixed };
        Kernels {
            reach: [
                of(0.75, 0.88, 2e-6),
                of(0.65, 0.80, 4e-6),
                of(0.60, 0.85, 3e-6),
                of(0.45, 0.80, 4e-6),
                of(0.65, 0.85, 4e-6),
                of(0.50, 0.85, 1e-6),
                of(1.0, 0.80, 0.0),
            ],
            step: 0.0,
            residual: None,
        }
    }

    /// That of an archetype by the name of its form.
    pub fn of(&self, form: &str) -> Reach {
        let place = match form {
            "outer" => "grouped",
            form => form,
        };
        let loops = ARCHETYPES.len() - 2;
        self.reach[ARCHETYPES.iter().position(|a| *a == place).unwrap_or(loops)]
    }

    /// As a file has it.
    pub fn save(&self) -> Value {
        let mut out = Map::new();
        for (name, r) in ARCHETYPES.iter().zip(&self.reach) {
            let fixed = crate::quantity::Kind::Time.show(r.fixed);
            out.insert(name.to_string(), json!({"compute": r.compute, "memory": r.memory, "fixed": fixed}));
        }
        out.insert("step".into(), json!(crate::quantity::Kind::Time.show(self.step)));
        if let Some(residual) = self.residual {
            out.insert("residual".into(), json!(residual));
        }
        Value::Object(out)
    }
}
