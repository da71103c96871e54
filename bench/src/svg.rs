//! Bars as an SVG file: no script, no fonts of its own, colours for light and dark. Lengths are in pixels of a picture 760 wide,
//! which a page scales.

use std::fmt::Write as _;

/// A picture of bars.
pub struct Chart {
    /// What it shows; also its name for screen readers.
    pub title: String,
    /// Of the numbers.
    pub unit: String,
    /// Class and meaning of each colour.
    pub key: Vec<(&'static str, &'static str)>,
    /// From top to bottom.
    pub groups: Vec<Group>,
}

/// Bars with one name.
pub struct Group {
    /// At the left.
    pub name: String,
    /// One under the other.
    pub bars: Vec<Bar>,
}

/// A bar of one or more parts.
pub struct Bar {
    /// Class and length, in the unit.
    pub parts: Vec<(&'static str, f64)>,
    /// At its end.
    pub label: String,
}

impl Bar {
    /// A bar of one part.
    pub fn one(class: &'static str, length: f64, label: String) -> Bar {
        Bar { parts: vec![(class, length)], label }
    }
}

const WIDTH: f64 = 760.0;
const LEFT: f64 = 170.0;
const RIGHT: f64 = 190.0;
const BAR: f64 = 13.0;

const STYLE: &str = "text{font:12px sans-serif;fill:#1b1f24}.t{font-weight:bold;font-size:14px}.s{fill:#5a636e}.g{stroke:#d0d7de}\
.ours,.prefill,.write{fill:#0b57d0}.peer,.restore{fill:#b35900}.rest{fill:#8a5cc7}\
@media(prefers-color-scheme:dark){text{fill:#e6e9ed}.s{fill:#a1abb6}.g{stroke:#333b45}.ours,.prefill,.write{fill:#7fb0ff}\
.peer,.restore{fill:#ffb061}.rest{fill:#b795e8}}";

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A round step that divides `most` into about five.
fn step(most: f64) -> f64 {
    let rough = most / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= rough).unwrap_or(rough)
}

impl Chart {
    /// The file.
    pub fn svg(&self) -> String {
        let length = |b: &Bar| b.parts.iter().map(|p| p.1).sum::<f64>();
        let most = self.groups.iter().flat_map(|g| &g.bars).map(length).fold(0.0, f64::max).max(1e-9);
        let wide = |v: f64| v / most * (WIDTH - LEFT - RIGHT);
        let bars: usize = self.groups.iter().map(|g| g.bars.len()).sum();
        let top = 50.0;
        let height = top + bars as f64 * (BAR + 2.0) + self.groups.len() as f64 * 8.0 + 30.0;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{0}\">\n<title>{0}</title>\n\
             <style>{STYLE}</style>\n<text class=\"t\" x=\"8\" y=\"18\">{0}</text>\n",
            escape(&self.title)
        );
        let mut x = 8.0;
        for (class, meaning) in &self.key {
            let _ = writeln!(
                out,
                "<rect class=\"{class}\" x=\"{x:.0}\" y=\"27\" width=\"11\" height=\"11\"/><text x=\"{:.0}\" y=\"37\">{}</text>",
                x + 16.0,
                escape(meaning)
            );
            x += 40.0 + meaning.chars().count() as f64 * 6.6;
        }
        let step = step(most);
        let mut at = 0.0;
        while at <= most * 1.0001 {
            let x = LEFT + wide(at);
            let _ = writeln!(
                out,
                "<line class=\"g\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{:.0}\"/><text class=\"s\" x=\"{x:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{at}</text>",
                height - 24.0,
                height - 10.0
            );
            at += step;
        }
        let _ = writeln!(
            out,
            "<text class=\"s\" x=\"{:.0}\" y=\"{:.0}\">{}</text>",
            WIDTH - RIGHT + 24.0,
            height - 10.0,
            escape(&self.unit)
        );
        let mut y = top + 4.0;
        for group in &self.groups {
            let middle = y + group.bars.len() as f64 * (BAR + 2.0) / 2.0 + 4.0;
            let _ = writeln!(
                out,
                "<text x=\"{:.0}\" y=\"{middle:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 8.0,
                escape(&group.name)
            );
            for bar in &group.bars {
                let mut x = LEFT;
                for (class, v) in &bar.parts {
                    let _ = writeln!(
                        out,
                        "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{BAR}\"/>",
                        wide(*v)
                    );
                    x += wide(*v);
                }
                let _ = writeln!(
                    out,
                    "<text class=\"s\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                    x + 6.0,
                    y + 10.5,
                    escape(&bar.label)
                );
                y += BAR + 2.0;
            }
            y += 8.0;
        }
        out + "</svg>\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_in_proportion_and_names_are_text() {
        let bar = |v| Bar::one("ours", v, format!("{v}"));
        let chart = Chart {
            title: "a < b".into(),
            unit: "ms".into(),
            key: vec![("ours", "us & them")],
            groups: vec![Group { name: "<x>".into(), bars: vec![bar(100.0), bar(25.0)] }],
        };
        let svg = chart.svg();
        assert!(svg.contains("width=\"400.0\"") && svg.contains("width=\"100.0\""), "{svg}");
        assert!(svg.contains("&lt;x&gt;") && svg.contains("us &amp; them") && !svg.contains("<x>"));
    }

    #[test]
    fn steps_are_round() {
        assert_eq!([1.0, 100.0, 1800.0, 37.0].map(step), [0.2, 20.0, 500.0, 10.0]);
    }
}
