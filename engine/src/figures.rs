//! Figures as people read them.

/// `12.3 MiB`.
pub fn bytes(n: u64) -> String {
    scaled(n as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

/// `5.05 M`.
pub fn count(n: u64) -> String {
    scaled(n as f64, 1000.0, &["", "k", "M", "G", "T", "P"])
}

fn scaled(mut x: f64, step: f64, units: &[&str]) -> String {
    let mut at = 0;
    while x >= step && at + 1 < units.len() {
        x /= step;
        at += 1;
    }
    let digits = if at == 0 { 0 } else { 2 };
    format!("{x:.digits$} {}", units[at]).trim_end().to_string()
}
