//! Numbers with their units. In: text such as `3.35 TB/s`. Out: the number in base units (bytes, seconds, operations, watts), or why it
//! cannot be one. A number without a unit is refused: simulators have been wrong by a thousand because of one.

/// What a number measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Bytes.
    Size,
    /// Bytes per second.
    Bandwidth,
    /// Operations per second; a fused multiply-add is two.
    Rate,
    /// Seconds.
    Time,
    /// Watts.
    Power,
    /// US dollars per hour.
    Price,
}

/// A unit's name and its size in base units.
type Unit = (&'static str, f64);

const SIZES: [Unit; 9] = [
    ("B", 1.0),
    ("kB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
    ("KiB", 1024.0),
    ("MiB", 1048576.0),
    ("GiB", 1073741824.0),
    ("TiB", 1099511627776.0),
];
const RATES: [Unit; 8] = [
    ("GFLOP/s", 1e9),
    ("TFLOP/s", 1e12),
    ("PFLOP/s", 1e15),
    ("TFLOPS", 1e12),
    ("PFLOPS", 1e15),
    ("GOP/s", 1e9),
    ("TOP/s", 1e12),
    ("TOPS", 1e12),
];
const TIMES: [Unit; 5] = [("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)];
const POWERS: [Unit; 2] = [("W", 1.0), ("kW", 1e3)];
const PRICES: [Unit; 1] = [("USD/h", 1.0)];

impl Kind {
    /// What a value of this kind looks like, for messages.
    pub fn example(self) -> &'static str {
        match self {
            Kind::Size => "80 GB",
            Kind::Bandwidth => "3.35 TB/s",
            Kind::Rate => "989 TFLOP/s",
            Kind::Time => "3 us",
            Kind::Power => "700 W",
            Kind::Price => "2.5 USD/h",
        }
    }

    /// Smallest and largest value that a machine may have; what is outside is a wrong unit.
    pub fn range(self) -> (f64, f64) {
        match self {
            Kind::Size => (1e6, 1e15),
            Kind::Bandwidth => (1e6, 1e15),
            Kind::Rate => (1e7, 1e18),
            Kind::Time => (0.0, 1.0),
            Kind::Power => (0.1, 1e6),
            Kind::Price => (0.0, 1e5),
        }
    }

    fn unit(self, name: &str) -> Option<f64> {
        let find = |table: &[Unit], name: &str| table.iter().find(|(n, _)| *n == name).map(|(_, f)| *f);
        match self {
            Kind::Size => find(&SIZES, name),
            Kind::Bandwidth => find(&SIZES, name.strip_suffix("/s")?),
            Kind::Rate => find(&RATES, name),
            Kind::Time => find(&TIMES, name),
            Kind::Power => find(&POWERS, name),
            Kind::Price => find(&PRICES, name),
        }
    }

    /// Reads a number and its unit.
    ///
    /// # Errors
    /// No number, no unit, a unit of something else, or a value that no machine has.
    pub fn parse(self, text: &str) -> Result<f64, String> {
        let text = text.trim();
        let end = text.find(|c: char| !(c.is_ascii_digit() || "+-.eE".contains(c))).unwrap_or(text.len());
        let (number, unit) = (&text[..end], text[end..].trim());
        let wrong = || {
            format!("`{text}` is no value here; write a number with its unit, such as \"{}\"", self.example())
        };
        let value: f64 = number.parse().map_err(|_| wrong())?;
        if unit.is_empty() {
            return Err(format!("`{text}` has no unit; write it as in \"{}\"", self.example()));
        }
        let value = value * self.unit(unit).ok_or_else(wrong)?;
        let (least, most) = self.range();
        match (least..=most).contains(&value) {
            true => Ok(value),
            false => Err(format!("`{text}` is no machine's; check the number and its unit")),
        }
    }

    /// Writes what [`parse`](Self::parse) reads: in the largest unit in which the number is at least one.
    pub fn show(self, value: f64) -> String {
        let decimal: &[Unit] = match self {
            Kind::Size | Kind::Bandwidth => &SIZES[..5],
            Kind::Rate => &RATES[..3],
            Kind::Time => &TIMES,
            Kind::Power => &POWERS,
            Kind::Price => &PRICES,
        };
        let fits = decimal.iter().rev().filter(|(_, f)| *f <= value.abs()).max_by(|a, b| a.1.total_cmp(&b.1));
        let (name, factor) = fits.or(decimal.first()).copied().unwrap_or(("", 1.0));
        // Six digits: files are read by people, and no peak is known better.
        let short: f64 = format!("{:.5e}", value / factor).parse().unwrap_or(value / factor);
        let per = if self == Kind::Bandwidth { "/s" } else { "" };
        format!("{short} {name}{per}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_spelled_out_and_checked() {
        assert_eq!(Kind::Bandwidth.parse("3.35 TB/s"), Ok(3.35e12));
        assert_eq!(Kind::Size.parse("80GiB"), Ok(80.0 * 1073741824.0));
        assert_eq!(Kind::Rate.parse("989 TFLOP/s"), Ok(9.89e14));
        assert_eq!(Kind::Time.parse("3 us"), Ok(3e-6));
        for (kind, text) in [
            (Kind::Bandwidth, "3350"),
            (Kind::Bandwidth, "3.35 TB"),
            (Kind::Rate, "NaN TFLOP/s"),
            (Kind::Rate, "inf"),
            (Kind::Size, "-80 GB"),
            (Kind::Time, "3 GB"),
            (Kind::Power, ""),
            (Kind::Bandwidth, "3.35e30 TB/s"),
        ] {
            assert!(kind.parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_shown_is_read_again() {
        for (kind, v) in [
            (Kind::Bandwidth, 3.35e12),
            (Kind::Rate, 9.89e14),
            (Kind::Time, 2.5e-6),
            (Kind::Size, 85899345920.0),
        ] {
            let again = kind.parse(&kind.show(v)).unwrap();
            assert!((again / v - 1.0).abs() < 1e-5, "{}", kind.show(v));
        }
    }
}
