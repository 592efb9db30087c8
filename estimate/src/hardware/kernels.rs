//! How far kernels reach a machine's peaks: a few numbers for each archetype, fitted to measurements and kept in the hardware's file.

use super::Precision;
use crate::quantity::Kind;
use serde_json::{Map, Value, json};

/// Kernels that have numbers of their own, by the names of their forms; the others take those of `loops`. `panels` are dots of a weight
/// that was packed ahead, and `grouped_panels` those of experts, which a processor multiplies with other loops than sides that lie as they
/// were made. `attention_one` is attention of one query of each sequence, which gets keys ready for few rows and waits for them.
pub const ARCHETYPES: [&str; 11] = [
    "dot",
    "panels",
    "grouped",
    "grouped_panels",
    "outer",
    "attention",
    "attention_one",
    "attention_grad",
    "loss",
    "loops",
    "collective",
];

/// Kernels that are one on devices other than processors, and in files that do not tell them apart: each with the one it is.
pub const SAME: [(&str, &str); 4] =
    [("panels", "dot"), ("grouped_panels", "grouped"), ("outer", "grouped"), ("attention_one", "attention")];

/// What part of the peaks kernels of one archetype reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reach {
    /// Part of the peak of operations that large products reach, in (0, 1].
    pub compute: f64,
    /// Part of the bandwidth of reading that large transfers reach, in (0, 2]: more than 1 where a kernel writes as much as it reads, which a link carries at once.
    pub memory: f64,
    /// Part of the lesser of computing and memory that does not hide behind the greater, in [0, 1].
    pub apart: f64,
    /// Seconds of a kernel beside its operations and bytes: filling and draining, phases that wait for one another.
    pub fixed: f64,
}

impl Reach {
    /// Its keys in a file.
    pub const KEYS: [&str; 4] = ["compute", "memory", "apart", "fixed"];
    /// The most that `memory` can be.
    pub const MOST_MOVED: f64 = 2.0;

    fn save(&self) -> Map<String, Value> {
        let [compute, memory, apart] = [self.compute, self.memory, self.apart].map(|x| json!(x));
        let values = [compute, memory, apart, json!(Kind::Time.show(self.fixed))];
        Reach::KEYS.iter().map(|k| k.to_string()).zip(values).collect()
    }
}

impl Default for Reach {
    fn default() -> Reach {
        Reach { compute: 1.0, memory: 1.0, apart: 0.0, fixed: 0.0 }
    }
}

/// Numbers of all archetypes of a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernels {
    /// In the order of [`ARCHETYPES`].
    pub reach: [Reach; ARCHETYPES.len()],
    /// Of those of an archetype that multiply in this type, where they differ.
    pub own: Vec<(usize, Precision, Reach)>,
    /// Seconds of a run of a program that no kernel takes.
    pub step: f64,
    /// Seconds of a serving engine's step beside its program: scheduling, passing tokens on.
    pub turn: f64,
    /// Seconds in which sampling looks at one logit.
    pub logit: f64,
    /// What a step of a server takes on average, as a multiple of the one in the middle, which the other numbers are fitted to; in [1, 10].
    pub usual: f64,
    /// Root mean square of ln(predicted / measured) over what the numbers were fitted to; none where they are defaults.
    pub residual: Option<f64>,
}

impl Kernels {
    /// The most that `usual` can be.
    pub const MOST_USUAL: f64 = 10.0;

    /// What kernels that are tuned for a GPU reach: measured by the sources of `kernels` in the presets.
    pub fn typical() -> Kernels {
        let of = |compute, memory, fixed| Reach { compute, memory, fixed, apart: 0.0 };
        Kernels {
            reach: [
                of(0.75, 0.88, 2e-6),
                of(0.75, 0.88, 2e-6),
                of(0.65, 0.80, 4e-6),
                of(0.65, 0.80, 4e-6),
                of(0.65, 0.80, 4e-6),
                of(0.60, 0.85, 3e-6),
                of(0.60, 0.85, 3e-6),
                of(0.45, 0.80, 4e-6),
                of(0.65, 0.85, 4e-6),
                of(0.50, 0.85, 1e-6),
                of(1.0, 0.80, 0.0),
            ],
            own: vec![],
            step: 0.0,
            turn: 0.0,
            logit: 0.0,
            usual: 1.0,
            residual: None,
        }
    }

    /// Whose numbers an archetype has on this kind of device, by name.
    pub fn counted(archetype: &'static str, kind: &str) -> &'static str {
        let same = SAME.iter().find(|(form, _)| kind != "cpu" && *form == archetype);
        same.map_or(archetype, |(_, of)| *of)
    }

    /// Which of [`ARCHETYPES`] has the numbers of a form of this name.
    pub fn archetype(form: &str) -> usize {
        ARCHETYPES.iter().position(|a| *a == form).unwrap_or(ARCHETYPES.len() - 2)
    }

    /// That of an archetype by the name of its form, of kernels that multiply in this type.
    pub fn of(&self, form: &str, precision: Precision) -> Reach {
        let at = Kernels::archetype(form);
        let own = self.own.iter().find(|(i, p, _)| (*i, *p) == (at, precision));
        own.map_or(self.reach[at], |(.., reach)| *reach)
    }

    /// As a file has it.
    pub fn save(&self) -> Value {
        let mut out = Map::new();
        for (i, (name, r)) in ARCHETYPES.iter().zip(&self.reach).enumerate() {
            let mut all = r.save();
            for (_, precision, own) in self.own.iter().filter(|(at, ..)| *at == i) {
                all.insert(precision.name().into(), Value::Object(own.save()));
            }
            out.insert(name.to_string(), Value::Object(all));
        }
        for (key, seconds) in [("step", self.step), ("turn", self.turn), ("logit", self.logit)] {
            out.insert(key.into(), json!(Kind::Time.show(seconds)));
        }
        out.insert("usual".into(), json!(self.usual));
        if let Some(residual) = self.residual {
            out.insert("residual".into(), json!(residual));
        }
        Value::Object(out)
    }
}
