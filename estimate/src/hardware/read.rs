//! Reading of hardware files. In: the JSON of a file, ours or LLMSim's. Out: hardware, or one line that names the key.

use super::{ARCHETYPES, Hardware, Kernels, Precision, Reach, SAME};
use crate::quantity::Kind;
use astrai_ir::target::Link;
use serde_json::{Map, Value};

/// An object of a file and where it stands.
struct Object<'a> {
    at: String,
    fields: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    fn of(at: &str, value: &'a Value) -> Result<Object<'a>, String> {
        match value.as_object() {
            Some(fields) => Ok(Object { at: at.to_string(), fields }),
            None => Err(format!("{} must be an object", if at.is_empty() { "the file" } else { at })),
        }
    }

    fn path(&self, key: &str) -> String {
        if self.at.is_empty() { key.to_string() } else { format!("{}.{key}", self.at) }
    }

    /// Refuses keys that mean nothing here.
    fn only(&self, known: &[&str]) -> Result<(), String> {
        match self.fields.keys().find(|k| !known.contains(&k.as_str())) {
            Some(key) => {
                let key = astrai_files::one_line(key);
                Err(format!("{} is not known; known are {}", self.path(&key), known.join(", ")))
            }
            None => Ok(()),
        }
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.fields.get(key)
    }

    fn object(&self, key: &str) -> Result<Option<Object<'a>>, String> {
        self.get(key).map(|v| Object::of(&self.path(key), v)).transpose()
    }

    fn text(&self, key: &str) -> Result<Option<String>, String> {
        let text = |v: &Value| v.as_str().map(astrai_files::one_line);
        self.get(key).map(|v| text(v).ok_or_else(|| format!("{} must be a text", self.path(key)))).transpose()
    }

    /// A number with its unit.
    fn quantity(&self, key: &str, kind: Kind) -> Result<Option<f64>, String> {
        let path = self.path(key);
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => {
                kind.parse(&astrai_files::one_line(text)).map(Some).map_err(|e| format!("{path}: {e}"))
            }
            Some(Value::Number(n)) => {
                Err(format!("{path}: {n} has no unit; write it as in \"{}\"", kind.example()))
            }
            Some(_) => Err(format!("{path} must be a number with its unit, such as \"{}\"", kind.example())),
        }
    }

    fn wanted(&self, key: &str, kind: Kind) -> Result<f64, String> {
        let missing = || format!("{} is missing; write it as in \"{}\"", self.path(key), kind.example());
        self.quantity(key, kind)?.ok_or_else(missing)
    }

    /// A plain number in a range.
    fn number(&self, key: &str, (least, most): (f64, f64)) -> Result<Option<f64>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().filter(|v| (least..=most).contains(v)) {
            Some(v) => Ok(Some(v)),
            None => Err(format!("{} must be a number from {least} to {most}", self.path(key))),
        }
    }

    /// A whole number in a range.
    fn count(&self, key: &str, range: (f64, f64)) -> Result<Option<u32>, String> {
        match self.number(key, range)? {
            Some(v) if v.fract() != 0.0 => Err(format!("{}: {v} is no whole number", self.path(key))),
            v => Ok(v.map(|v| v as u32)),
        }
    }
}

/// Reads the JSON of a file.
pub fn hardware(value: &Value) -> Result<Hardware, String> {
    let file = Object::of("", value)?;
    match file.object("bandwidth") {
        Ok(Some(_)) => crate::llmsim::Machine::parse(value).map(|m| m.hardware()),
        _ => ours(&file),
    }
}

const KEYS: [&str; 15] = [
    "name", "kind", "units", "memory", "cache", "exchange", "product", "compute", "launch", "links", "power",
    "price", "kernels", "sources", "notes",
];

fn ours(file: &Object) -> Result<Hardware, String> {
    file.only(&KEYS)?;
    let name = file.text("name")?.filter(|n| !n.is_empty()).ok_or("name is missing")?;
    let memory = file
        .object("memory")?
        .ok_or("memory is missing; write {size: \"80 GB\", bandwidth: \"3.35 TB/s\"}")?;
    memory.only(&["size", "bandwidth", "process"])?;
    let compute = file.object("compute")?.ok_or("compute is missing; write {bf16: \"989 TFLOP/s\"}")?;
    compute.only(&Precision::ALL.map(Precision::name))?;
    let mut peaks = Vec::new();
    for p in Precision::ALL {
        peaks.extend(compute.quantity(p.name(), Kind::Rate)?.map(|v| (p, v)));
    }
    if !peaks.iter().any(|(p, _)| matches!(p, Precision::F32 | Precision::Bf16)) {
        return Err("compute must state fp32 or bf16".into());
    }
    let kind = file.text("kind")?.unwrap_or_else(|| "gpu".into());
    if !["gpu", "xpu", "accelerator", "cpu"].contains(&kind.as_str()) {
        return Err(format!("kind: `{kind}` is none; there are gpu, xpu, accelerator, cpu"));
    }
    Ok(Hardware {
        name,
        kind,
        units: file.count("units", (1.0, 1e5))?.unwrap_or(1),
        memory: memory.wanted("size", Kind::Size)?,
        process: memory.quantity("process", Kind::Size)?.unwrap_or(0.0),
        bandwidth: memory.wanted("bandwidth", Kind::Bandwidth)?,
        caches: caches(file)?,
        exchange: file.quantity("exchange", Kind::Bandwidth)?,
        product: file.quantity("product", Kind::Rate)?,
        faster: 1.0,
        compute: peaks,
        launch: file.quantity("launch", Kind::Time)?.unwrap_or(2e-6),
        links: links(file)?,
        power: file.quantity("power", Kind::Power)?,
        price: file.quantity("price", Kind::Price)?,
        kernels: match file.object("kernels")? {
            Some(k) => kernels(&k)?,
            None => Kernels::typical(),
        },
        sources: texts(file, "sources")?,
    })
}

fn texts(file: &Object, key: &str) -> Result<Vec<String>, String> {
    let wrong = || format!("{key} must be a list of texts");
    let Some(value) = file.get(key) else { return Ok(vec![]) };
    let list = value.as_array().ok_or_else(wrong)?;
    list.iter().map(|v| v.as_str().map(str::to_string).ok_or_else(wrong)).collect()
}

/// One cache, or a list of them.
fn caches(file: &Object) -> Result<Vec<(f64, f64)>, String> {
    let one = |at: &str, value| {
        let cache = Object::of(at, value)?;
        cache.only(&["size", "bandwidth"])?;
        Ok::<_, String>((cache.wanted("size", Kind::Size)?, cache.wanted("bandwidth", Kind::Bandwidth)?))
    };
    let found = match file.get("cache") {
        None => vec![],
        Some(Value::Array(all)) => {
            let each = all.iter().enumerate().map(|(i, value)| one(&format!("cache[{i}]"), value));
            each.collect::<Result<Vec<_>, _>>()?
        }
        Some(value) => vec![one("cache", value)?],
    };
    match found.windows(2).any(|w| w[0].0 >= w[1].0) {
        true => Err("cache must stand from the smallest to the greatest".into()),
        false => Ok(found),
    }
}

fn links(file: &Object) -> Result<Vec<Link>, String> {
    let Some(value) = file.get("links") else { return Ok(vec![]) };
    let list = value.as_array().ok_or("links must be a list")?;
    let mut found: Vec<Link> = Vec::new();
    for (i, value) in list.iter().enumerate() {
        let link = Object::of(&format!("links[{i}]"), value)?;
        link.only(&["name", "devices", "bandwidth", "latency"])?;
        let devices = link.count("devices", (2.0, 1e7))?;
        found.push(Link {
            name: link.text("name")?.unwrap_or_else(|| format!("link {i}")),
            devices: devices.ok_or_else(|| format!("{} is missing", link.path("devices")))?,
            bandwidth: link.wanted("bandwidth", Kind::Bandwidth)?,
            latency: link.wanted("latency", Kind::Time)?,
        });
    }
    if found.windows(2).any(|w| w[0].devices >= w[1].devices) {
        return Err("links must stand from the nearest to the farthest, each joining more devices than the one before".into());
    }
    Ok(found)
}

fn kernels(o: &Object) -> Result<Kernels, String> {
    let known: Vec<&str> =
        ARCHETYPES.into_iter().chain(["step", "turn", "logit", "usual", "residual"]).collect();
    o.only(&known)?;
    let mut all = Kernels::typical();
    for (i, name) in ARCHETYPES.iter().enumerate() {
        let Some(given) = o.object(name)? else { continue };
        let types = Precision::ALL.map(Precision::name);
        given.only(&[&Reach::KEYS[..], &types].concat())?;
        all.reach[i] = reach(&given, all.reach[i])?;
        for precision in Precision::ALL {
            if let Some(own) = given.object(precision.name())? {
                own.only(&Reach::KEYS)?;
                all.own.push((i, precision, reach(&own, all.reach[i])?));
            }
        }
    }
    for (name, of) in SAME.into_iter().filter(|(name, _)| o.get(name).is_none()) {
        let [to, from] = [name, of].map(Kernels::archetype);
        all.reach[to] = all.reach[from];
        let own: Vec<_> = all.own.iter().filter(|(i, ..)| *i == from).map(|(_, p, r)| (to, *p, *r)).collect();
        all.own.extend(own);
    }
    let seconds = |key| Ok::<_, String>(o.quantity(key, Kind::Time)?.unwrap_or(0.0));
    (all.step, all.turn, all.logit) = (seconds("step")?, seconds("turn")?, seconds("logit")?);
    all.usual = o.number("usual", (1.0, Kernels::MOST_USUAL))?.unwrap_or(1.0);
    all.residual = o.number("residual", (0.0, 100.0))?;
    Ok(all)
}

fn reach(given: &Object, or: Reach) -> Result<Reach, String> {
    let part = |key, or, range| given.number(key, range).map(|v| v.unwrap_or(or));
    Ok(Reach {
        compute: part("compute", or.compute, (1e-6, 1.0))?,
        memory: part("memory", or.memory, (1e-6, Reach::MOST_MOVED))?,
        apart: part("apart", or.apart, (0.0, 1.0))?,
        fixed: given.quantity("fixed", Kind::Time)?.unwrap_or(or.fixed),
    })
}
