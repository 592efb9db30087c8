//! The picture of a run. In: rows of `metrics.jsonl`. Out: `loss.svg`, which any browser opens: loss and validation loss
//! over steps above, the learning rate and the norm of the gradient below.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::metrics::{self, Row};
use astrai_files::{FileError, System, replace};

/// Width and height, pixels.
const SIZE: (u32, u32) = (960, 840);
/// Where the chart of the rate and that of the norm begin, pixels from above.
const BELOW: [u32; 2] = [440, 640];
/// Parts of the horizontal axis of which a curve shows extremes at most; a longer one shows no more on a screen.
const COLUMNS: usize = 800;
/// The smoothed curve forgets over one part in so many of the run.
const MEMORY: usize = 100;
/// Numbers beyond this are left out: no loss is like that, and axes cannot show them.
const LARGEST: f64 = 1e30;

const TITLE: (&str, u32) = ("sans-serif", 22);
const DESCRIPTION: (&str, u32) = ("sans-serif", 17);
const LABEL: (&str, u32) = ("sans-serif", 15);

const RAW: RGBColor = RGBColor(31, 119, 180);
const SMOOTH: RGBColor = RGBColor(12, 60, 110);
const VALIDATION: RGBColor = RGBColor(214, 90, 20);
const RATE: RGBColor = RGBColor(60, 130, 70);
const NORM: RGBColor = RGBColor(125, 75, 160);

type Points = Vec<(f64, f64)>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn<'a> = Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

/// Draws the file `svg` anew from the file `metrics`; readers see the old picture or the new one. Gives a line for the user
/// for rows that could not be read.
///
/// # Errors
/// The system refuses.
pub fn draw(metrics: &Path, svg: &Path) -> Result<Vec<String>, FileError> {
    let (rows, notes) = metrics::read(metrics)?;
    let picture = loss_svg(&rows).map_err(|e| FileError::refused(svg, e))?;
    replace(&System, svg, picture.as_bytes())?;
    Ok(notes)
}

/// The picture as SVG text.
///
/// # Errors
/// The plotting library's own, in words.
pub fn loss_svg(rows: &[Row]) -> Result<String, String> {
    let [mut loss, mut rate, mut norm, mut validation] = [const { Points::new() }; 4];
    for row in rows {
        let step = row.step() as f64;
        match row {
            Row::Step(row) => {
                loss.push((step, row.loss));
                rate.push((step, row.lr));
                norm.push((step, row.grad_norm));
            }
            Row::Validation(row) => validation.push((step, row.val_loss)),
        }
    }
    for points in [&mut loss, &mut rate, &mut norm, &mut validation] {
        points.retain(|(_, y)| y.is_finite() && y.abs() < LARGEST);
    }
    let last = rows.iter().map(Row::step).max().unwrap_or(0).max(1) as f64;
    let mut text = String::new();
    let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
    let drawn = area.fill(&WHITE).and_then(|()| {
        let (upper, lower) = area.split_vertically(BELOW[0]);
        let (middle, lower) = lower.split_vertically(BELOW[1] - BELOW[0]);
        draw_losses(&upper, last, &loss, &validation)?;
        draw_below(&middle, last, &rate, ("learning rate", RATE))?;
        draw_below(&lower, last, &norm, ("gradient norm", NORM))?;
        area.present()
    });
    drawn.map_err(|e| format!("cannot draw the picture: {e}"))?;
    drop(area);
    Ok(text)
}

fn draw_losses<'a>(area: &Area<'a>, last: f64, loss: &[(f64, f64)], validation: &[(f64, f64)]) -> Drawn<'a> {
    let smooth = smoothed(loss);
    let (low, high) = range(loss.iter().chain(validation));
    let mut chart = ChartBuilder::on(area)
        .caption("Loss", TITLE)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..last, low..high)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .label_style(LABEL)
        .axis_desc_style(DESCRIPTION)
        .x_desc("step")
        .y_desc("loss (nats per token)")
        .x_label_formatter(&count)
        .draw()?;
    let raw = RAW.mix(0.35).stroke_width(1);
    chart.draw_series(LineSeries::new(thin(loss), raw))?.label("loss").legend(move |at| stroke(at, raw));
    let bold = SMOOTH.stroke_width(2);
    let series = LineSeries::new(thin(&smooth), bold);
    chart.draw_series(series)?.label("loss, smoothed").legend(move |at| stroke(at, bold));
    if !validation.is_empty() {
        let line = VALIDATION.stroke_width(2);
        let series = LineSeries::new(thin(validation), line).point_size(3);
        chart.draw_series(series)?.label("validation loss").legend(move |at| stroke(at, line));
    }
    chart
        .configure_series_labels()
        .label_font(DESCRIPTION)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()
}

/// A curve of what is never below 0.
fn draw_below<'a>(
    area: &Area<'a>,
    last: f64,
    points: &[(f64, f64)],
    (what, color): (&str, RGBColor),
) -> Drawn<'a> {
    let (_, high) = range(points.iter().chain(&[(0.0, 0.0)]));
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..last, 0.0..high.max(1e-12))?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .y_labels(5)
        .label_style(LABEL)
        .axis_desc_style(DESCRIPTION)
        .x_desc("step")
        .y_desc(what)
        .x_label_formatter(&count)
        .y_label_formatter(&|y| format!("{y:.1e}"))
        .draw()?;
    chart.draw_series(LineSeries::new(thin(points), color.stroke_width(2))).map(drop)
}

fn count(step: &f64) -> String {
    format!("{step:.0}")
}

/// A piece of a line for the legend.
fn stroke(at: (i32, i32), style: ShapeStyle) -> PathElement<(i32, i32)> {
    PathElement::new([at, (at.0 + 18, at.1)], style)
}

/// The vertical axis that shows all points with a margin.
fn range<'a>(points: impl Iterator<Item = &'a (f64, f64)>) -> (f64, f64) {
    let (low, high) = points.fold((f64::MAX, f64::MIN), |(low, high), (_, y)| (low.min(*y), high.max(*y)));
    if low > high {
        return (0.0, 1.0);
    }
    // Steps between labels below the numbers' own resolution would never reach the axis's end.
    let least = 1e-6 * low.abs().max(high.abs()).max(1e-9);
    let margin = (0.05 * (high - low)).max(least);
    (low - margin, high + margin)
}

/// The exponential mean of a curve, corrected for its beginning.
fn smoothed(points: &[(f64, f64)]) -> Points {
    let keep = 1.0 - 1.0 / (points.len() / MEMORY).max(1) as f64;
    let (mut mean, mut weight) = (0.0, 0.0);
    let next = |&(step, y): &(f64, f64)| {
        mean = keep * mean + (1.0 - keep) * y;
        weight = keep * weight + (1.0 - keep);
        (step, mean / weight)
    };
    points.iter().map(next).collect()
}

/// The lowest and the highest point of every column, in their order, so that no spike is lost.
fn thin(points: &[(f64, f64)]) -> Points {
    if points.len() <= 2 * COLUMNS {
        return points.to_vec();
    }
    let mut kept = Points::new();
    for column in points.chunks(points.len().div_ceil(COLUMNS)) {
        let by_height = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let mut both: Points = column.iter().min_by(by_height).into_iter().copied().collect();
        both.extend(column.iter().max_by(by_height));
        both.sort_by(|a, b| a.0.total_cmp(&b.0));
        kept.extend(both);
    }
    kept
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::metrics::{Metrics, StepMetrics, Validation, Writer};

    fn row(step: u64, loss: f64, lr: f64) -> Row {
        let (tokens, rest) = (step, 0.0);
        Row::Step(StepMetrics {
            step,
            epoch: rest,
            tokens,
            loss,
            lr,
            grad_norm: rest,
            tokens_per_s: rest,
            seconds: rest,
            mfu: rest,
            loss_scale: None,
            router: None,
            metrics: Default::default(),
        })
    }

    fn curve(steps: u64) -> Vec<Row> {
        let noise = |step: u64| (step * 7919 % 101) as f64 / 200.0;
        let loss = |step: u64| 3.0 + 6.0 * (-(step as f64) / 300.0).exp() + noise(step);
        let mut rows = Vec::new();
        for step in 1..=steps {
            rows.push(row(step, loss(step), 3e-4 * (1.0 - step as f64 / (steps + 1) as f64)));
            if step % 100 == 0 {
                rows.push(Row::Validation(Validation {
                    step,
                    val_loss: loss(step) + 0.2,
                    metrics: Default::default(),
                }));
            }
        }
        rows
    }

    #[test]
    fn the_picture_has_axes_and_curves() {
        let svg = loss_svg(&curve(1000)).expect("drawn");
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
        for text in [
            "step",
            "loss (nats per token)",
            "learning rate",
            "gradient norm",
            "validation loss",
            "loss, smoothed",
        ] {
            assert!(svg.contains(text), "no {text}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        for (color, opacity) in
            [("#1F77B4", "0.35"), ("#0C3C6E", "1"), ("#D65A14", "1"), ("#3C8246", "1"), ("#7D4BA0", "1")]
        {
            let curve = format!("<polyline fill=\"none\" opacity=\"{opacity}\" stroke=\"{color}\"");
            assert!(svg.contains(&curve), "no {curve}");
        }
    }

    #[test]
    fn a_long_run_takes_no_more_room_than_a_screen_shows() {
        let svg = loss_svg(&curve(200_000)).expect("drawn");
        assert!(svg.len() < 250_000, "{} bytes", svg.len());
        let mut rows = curve(200_000);
        rows[77_777] = row(77_777, 50.0, 1e-4);
        let points: Points =
            rows.iter().map(|r| if let Row::Step(r) = r { r.loss } else { 3.0 }).map(|y| (0.0, y)).collect();
        assert!(thin(&points).iter().any(|(_, y)| *y == 50.0), "the spike is lost");
    }

    #[test]
    fn smoothing_by_hand() {
        // 200 points: the memory is 2, half of the old and half of the new, weights corrected.
        let points: Points = (0..200).map(|i| (f64::from(i), if i == 0 { 4.0 } else { 1.0 })).collect();
        let got = smoothed(&points);
        assert_eq!(got[0], (0.0, 4.0));
        assert_eq!(got[1], (1.0, 2.0));
        assert!((got[2].1 - 10.0 / 7.0).abs() < 1e-12);
        assert!(smoothed(&[]).is_empty());
    }

    #[test]
    fn the_file_is_replaced_whole() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (from, to) = (folder.path().join("metrics.jsonl"), folder.path().join("loss.svg"));
        assert!(draw(&from, &to).expect("an empty picture").is_empty());
        let mut metrics = Metrics::create(&from).expect("created");
        curve(5).iter().for_each(|row| metrics.add(row).expect("added"));
        draw(&from, &to).expect("drawn");
        assert_eq!(std::fs::read_to_string(&to).expect("read"), loss_svg(&curve(5)).expect("drawn"));
        assert_eq!(std::fs::read_dir(folder.path()).expect("listed").count(), 2);
    }

    #[test]
    fn strange_numbers_end_in_a_picture() {
        let strange = [f64::NAN, f64::INFINITY, -1e29, 1e29, 0.0, 1e8, 1e8 + 1e-7, 1e-300, f64::MAX];
        for a in strange {
            for b in strange {
                let rows = [row(0, a, b), row(u64::MAX, b, a), row(3, a, a)];
                for rows in [&rows[..1], &rows[2..], &rows] {
                    assert!(!loss_svg(rows).expect("drawn").contains("NaN"), "{a} {b}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_rows_end_in_a_picture(rows in proptest::collection::vec((any::<u64>(), any::<f64>(), any::<f64>()), 0..6)) {
            let rows: Vec<Row> = rows.into_iter().map(|(step, loss, lr)| row(step, loss, lr)).collect();
            loss_svg(&rows).map_err(TestCaseError::fail)?;
        }
    }
}
