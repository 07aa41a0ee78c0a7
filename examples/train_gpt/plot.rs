//! The losses as a picture.

use plotters::prelude::*;

/// The losses of a run.
#[derive(Clone, Debug, Default)]
pub struct LossCurve {
    /// The training loss of each step.
    pub training: Vec<f32>,
    /// Numbers of steps and the validation losses after them.
    pub validation: Vec<(usize, f64)>,
}

/// Colours that read well on white and on black; the picture has no background of its own.
const GREY: RGBColor = RGBColor(118, 118, 118);
const BLUE: RGBColor = RGBColor(56, 132, 214);
const ORANGE: RGBColor = RGBColor(224, 122, 32);
const SIZE: (u32, u32) = (840, 480);
const FONT: &str = "sans-serif";

impl LossCurve {
    /// Returns the mean training loss of the last `steps` steps; NaN before the first step.
    pub fn recent(&self, steps: usize) -> f64 {
        let from = self.training.len().saturating_sub(steps);
        mean(&self.training[from..])
    }

    /// Draws the losses as an SVG file: each step's training loss pale, its mean over a hundredth of the run as a line,
    /// and the validation losses as points on a line. Losses that are not finite leave gaps.
    pub fn svg(&self, title: &str) -> String {
        let mut svg = String::new();
        self.draw(title, &mut svg).expect("a text can always be written to");
        svg
    }

    fn draw(&self, title: &str, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let steps: Vec<(f64, f64)> =
            self.training.iter().zip(1..).map(|(&y, x)| (f64::from(x), y.into())).collect();
        let smooth: Vec<(f64, f64)> = self.smoothed();
        let validation: Vec<(f64, f64)> = self.validation.iter().map(|&(x, y)| (x as f64, y)).collect();
        let last = steps.iter().chain(&validation).fold(1.0, |last: f64, (x, _)| last.max(*x));

        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        let font = |size: u32| (FONT, size).into_font().color(&GREY);
        let mut chart = ChartBuilder::on(&area)
            .margin(16)
            .caption(title, font(18))
            .x_label_area_size(44)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..last, range(steps.iter().chain(&validation)))?;
        chart
            .configure_mesh()
            .bold_line_style(GREY.mix(0.25))
            .light_line_style(TRANSPARENT)
            .axis_style(GREY)
            .label_style(font(14))
            .axis_desc_style(font(15))
            .x_desc("step")
            .y_desc("loss (nats per character)")
            .x_labels(11.min(last as usize + 1))
            .y_labels(10)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .draw()?;
        let line = |points: &[(f64, f64)], style: ShapeStyle| {
            let parts = points.split(|(_, y)| !y.is_finite()).filter(|part| !part.is_empty());
            parts.map(|part| PathElement::new(part.to_vec(), style)).collect::<Vec<_>>()
        };
        let sample = |color: RGBColor| {
            move |(x, y): (i32, i32)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2))
        };
        chart.draw_series(line(&steps, BLUE.mix(0.25).stroke_width(1)))?;
        chart.draw_series(line(&smooth, BLUE.stroke_width(2)))?.label("training").legend(sample(BLUE));
        let points = validation.iter().filter(|(_, y)| y.is_finite());
        chart.draw_series(points.map(|&point| Circle::new(point, 3, ORANGE.filled())))?;
        chart
            .draw_series(line(&validation, ORANGE.stroke_width(2)))?
            .label("validation")
            .legend(sample(ORANGE));
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .border_style(GREY.mix(0.4))
            .margin(12)
            .label_font(font(15))
            .draw()?;
        area.present()?;
        Ok(())
    }

    /// The mean of each step and those before it, over a hundredth of the run.
    fn smoothed(&self) -> Vec<(f64, f64)> {
        let window = (self.training.len() / 100).max(1);
        let at = |i: usize| mean(&self.training[(i + 1).saturating_sub(window)..=i]);
        (0..self.training.len()).map(|i| ((i + 1) as f64, at(i))).collect()
    }
}

fn mean(losses: &[f32]) -> f64 {
    losses.iter().map(|&x| f64::from(x)).sum::<f64>() / losses.len() as f64
}

/// The range of the finite losses with a margin, never empty.
fn range<'a>(points: impl Iterator<Item = &'a (f64, f64)>) -> std::ops::Range<f64> {
    let finite = points.map(|(_, y)| *y).filter(|y| y.is_finite());
    let (lo, hi) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(lo, hi), y| (lo.min(y), hi.max(y)));
    if lo > hi {
        return 0.0..1.0;
    }
    let margin = ((hi - lo) * 0.05).max(1e-3);
    (lo - margin).max(0.0)..hi + margin
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_is_a_picture_with_axes_labels_and_a_legend() {
        let curve = LossCurve {
            training: (0..500).map(|i| 1.5 + 2.7 * (-0.01 * i as f32).exp()).collect(),
            validation: vec![(250, 1.9), (500, 1.7)],
        };
        let svg = curve.svg("a run of 500 steps");
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        for text in [
            "a run of 500 steps",
            "step",
            "loss (nats per character)",
            "training",
            "validation",
            "250",
            "2.5",
        ] {
            assert!(svg.lines().any(|line| line.trim() == text), "no {text:?} in:\n{svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        assert!((curve.recent(1) - f64::from(curve.training[499])).abs() < 1e-12);
    }

    #[test]
    fn losses_that_are_not_finite_leave_gaps() {
        for training in [vec![], vec![f32::NAN], vec![2.0, f32::NAN, f32::INFINITY, 1.0, 1.0], vec![3.0]] {
            let svg = LossCurve { validation: vec![(training.len(), f64::NAN)], training }.svg("");
            assert!(svg.contains("</svg>") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
        assert!(LossCurve::default().recent(100).is_nan());
    }
}
