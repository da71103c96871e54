//! The pictures of the page, as SVG within it. Each is a `figure` with a sentence for those who do not see it; where the numbers are
//! not in a table beside it already, they are in one below.

use std::fmt::Write as _;

use serde_json::Value;

use crate::html::{escape, millis, small};

/// Width of every picture in its own units; a screen scales it.
const WIDTH: f64 = 720.0;
/// Room for names at the left.
const LEFT: f64 = 150.0;
/// The exponents at which a colour begins: below the first is the faintest.
const STEPS: [f64; 7] = [-6.0, -5.0, -4.0, -3.0, -2.5, -2.0, -1.0];

/// A picture with its words.
fn figure(height: f64, words: &str, body: &str, caption: &str) -> String {
    format!(
        "<figure><div class=wide role=region tabindex=0 aria-label=picture><svg viewBox=\"0 0 {WIDTH} {height}\" role=img \
         aria-label=\"{}\">{body}</svg></div><figcaption>{}</figcaption></figure>\n",
        escape(words),
        escape(caption)
    )
}

/// Where a value lies between the powers of ten `low` and `high`.
fn on_log(v: f64, low: f64, high: f64) -> f64 {
    if v <= 0.0 || !v.is_finite() {
        return LEFT;
    }
    LEFT + ((v.log10() - low) / (high - low)).clamp(0.0, 1.0) * (WIDTH - LEFT - 20.0)
}

/// The powers of ten around some values.
fn decades(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
    for v in values.filter(|v| *v > 0.0 && v.is_finite()) {
        low = low.min(v.log10().floor());
        high = high.max(v.log10().ceil());
    }
    if low.is_finite() { (low, high.max(low + 1.0)) } else { (-1.0, 0.0) }
}

fn axis(low: f64, high: f64, height: f64) -> String {
    let mut out = String::new();
    let step = ((high - low) / 6.0).ceil().max(1.0);
    let mut e = low;
    while e <= high + 0.1 {
        let x = on_log(10f64.powf(e), low, high);
        let _ = write!(
            out,
            "<line class=grid x1={x:.1} x2={x:.1} y1=4 y2={:.1} /><text class=soft x={x:.1} y={:.1} text-anchor=middle>1e{e:.0}</text>",
            height - 18.0,
            height - 4.0
        );
        e += step;
    }
    out
}

/// Ours and the server's own, one pair of bars under the other.
pub(crate) fn pairs(rows: &[(&str, f64, f64)]) -> String {
    let (low, high) = decades(rows.iter().flat_map(|r| [r.1, r.2]));
    let low = low - 0.3;
    let height = rows.len() as f64 * 26.0 + 28.0;
    let mut body = axis(low.ceil(), high, height);
    for (i, (name, ours, own)) in rows.iter().enumerate() {
        let y = i as f64 * 26.0 + 6.0;
        let bar = |v: f64| (on_log(v, low.ceil(), high) - LEFT).max(if v > 0.0 { 2.0 } else { 0.0 });
        let _ = write!(
            body,
            "<text x={:.0} y={:.1} text-anchor=end>{}</text><rect x={LEFT} y={y:.1} width={:.1} height=9 style=\"fill:var(--ours)\"/>\
             <rect x={LEFT} y={:.1} width={:.1} height=9 style=\"fill:var(--own)\"/>",
            LEFT - 8.0,
            y + 14.0,
            escape(name),
            bar(*ours),
            y + 10.0,
            bar(*own),
        );
    }
    let words: Vec<String> =
        rows.iter().map(|(n, a, b)| format!("{n}: ours {}, the server's own {}", small(*a), small(*b))).collect();
    let key = "<ul class=key aria-hidden=true><li><i style=\"background:var(--ours)\"></i>ours<li><i style=\"background:var(--own)\"></i>the \
               server from itself</ul>\n";
    key.to_owned()
        + &figure(
            height,
            &words.join("; "),
            &body,
            "Logarithmic. A bar of ours that is not longer than the server's own is lost in its noise.",
        )
}

/// One prompt of the picture of divergences.
pub(crate) struct Dots {
    /// The prompt.
    pub name: String,
    /// After the handoff.
    pub ours: Option<f64>,
    /// Cold, in small batches, with the other attention.
    pub own: [Option<f64>; 3],
}

/// Divergences per prompt: ours as a dot, the server's own as strokes.
pub(crate) fn dots(rows: &[Dots]) -> String {
    let all = || rows.iter().flat_map(|r| r.own.into_iter().chain([r.ours])).flatten();
    if all().next().is_none() {
        return "<p class=note>No prompt was compared with a control.</p>\n".into();
    }
    let (low, high) = decades(all());
    let height = rows.len() as f64 * 18.0 + 28.0;
    let mut body = axis(low, high, height);
    for (i, r) in rows.iter().enumerate() {
        let y = i as f64 * 18.0 + 14.0;
        let _ = write!(body, "<text x={:.0} y={:.1} text-anchor=end>{}</text>", LEFT - 8.0, y + 4.0, escape(&r.name));
        for v in r.own.iter().flatten() {
            let x = on_log(*v, low, high);
            let _ =
                write!(body, "<rect x={:.1} y={:.1} width=3 height=12 style=\"fill:var(--own)\"/>", x - 1.5, y - 6.0);
        }
        if let Some(v) = r.ours {
            let _ = write!(body, "<circle cx={:.1} cy={y:.1} r=5 style=\"fill:var(--ours)\"/>", on_log(v, low, high));
        }
    }
    let below = |r: &&Dots| r.ours.is_some_and(|v| r.own.iter().flatten().any(|o| v <= *o));
    let words = format!(
        "Of {} prompts, the handed-over one is no further from the control than one of the server's own variants on {}. The numbers are \
         in the table below.",
        rows.iter().filter(|r| r.ours.is_some()).count(),
        rows.iter().filter(below).count()
    );
    let key = "<ul class=key aria-hidden=true><li><i style=\"background:var(--ours)\"></i>after the handoff<li><i \
               style=\"background:var(--own)\"></i>the server's own: cold, batches of 32, the other attention or what stands in for it</ul>\n";
    key.to_owned()
        + &figure(
            height,
            &words,
            &body,
            "KL divergence in nats from the control, logarithmic; what is 0 stands at the left edge.",
        )
}

/// Which colour a value has.
fn class(v: f64) -> usize {
    if v <= 0.0 { 0 } else { STEPS.iter().filter(|s| v.log10() >= **s).count() }
}

fn numbers(line: &str) -> Vec<Option<f64>> {
    line.split(' ').map(|w| w.parse().ok()).collect()
}

/// Differences by layer and position, of every part, ours and the server's own.
pub(crate) fn heat(heat: &Value) -> String {
    let Some(parts) = heat["parts"].as_array().filter(|p| !p.is_empty()) else { return String::new() };
    let edges: Vec<u64> = heat["positions"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    let last = edges.last().copied().unwrap_or(0);
    let prompt = heat["prompt"].as_str().unwrap_or("");
    let mut out = format!(
        "<h4>Where the difference lies: prompt {}, {last} positions</h4>\n<ul class=key aria-hidden=true>",
        escape(prompt)
    );
    for i in 0..=STEPS.len() {
        let name = match i {
            0 => "below 1e-6".to_owned(),
            i => format!("from {:.0e}", 10f64.powf(STEPS[i - 1])),
        };
        let _ = write!(out, "<li><i style=\"background:var(--h{i})\"></i>{name}");
    }
    out += "</ul>\n<div class=grids>\n";
    for part in parts {
        let name = part["part"].as_str().unwrap_or("");
        let layers: Vec<u64> = part["layers"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
        for (key, whose) in [("ours", "ours"), ("noise", "the server from itself")] {
            let rows: Vec<Vec<Option<f64>>> =
                part[key].as_array().into_iter().flatten().filter_map(Value::as_str).map(numbers).collect();
            if !rows.is_empty() {
                out += &grid(name, whose, &layers, &edges, &rows);
            }
        }
    }
    out += "</div>\n<details class=numbers><summary>The numbers by layer</summary>";
    out += &worst_by_layer(parts, &edges);
    out + "</details>\n"
}

fn grid(part: &str, whose: &str, layers: &[u64], edges: &[u64], rows: &[Vec<Option<f64>>]) -> String {
    let (left, top, width) = (40.0, 4.0, 400.0);
    let cell_w = (width - left) / edges.len().saturating_sub(1).max(1) as f64;
    let cell_h = (240.0 / rows.len() as f64).clamp(6.0, 24.0);
    let height = top + cell_h * rows.len() as f64 + 18.0;
    // One path per colour instead of a thousand rectangles.
    let mut paths = vec![String::new(); STEPS.len() + 1];
    let mut worst: Option<(f64, usize, usize)> = None;
    for (y, row) in rows.iter().enumerate() {
        for (x, v) in row.iter().enumerate().filter_map(|(x, v)| Some((x, (*v)?))) {
            if worst.is_none_or(|w| v > w.0) {
                worst = Some((v, y, x));
            }
            let _ = write!(
                paths[class(v)],
                "M{:.1} {:.1}h{cell_w:.2}v{cell_h:.2}h-{cell_w:.2}z",
                left + x as f64 * cell_w,
                top + y as f64 * cell_h
            );
        }
    }
    let mut body = String::new();
    for (i, d) in paths.iter().enumerate().filter(|(_, d)| !d.is_empty()) {
        let _ = write!(body, "<path d=\"{d}\" style=\"fill:var(--h{i})\"/>");
    }
    let every = layers.len().div_ceil(8).max(1);
    for (i, layer) in layers.iter().enumerate().step_by(every) {
        let y = top + (i as f64 + 0.5) * cell_h + 4.0;
        let _ = write!(body, "<text class=soft x={:.0} y={y:.1} text-anchor=end>{layer}</text>", left - 6.0);
    }
    let bottom = height - 4.0;
    let last = edges.last().copied().unwrap_or(0);
    let _ = write!(
        body,
        "<text class=soft x={left} y={bottom:.1}>0</text><text class=soft x={width} y={bottom:.1} text-anchor=end>{}</text>",
        last.saturating_sub(1)
    );
    let words = match worst {
        Some((v, y, x)) => format!(
            "{part}, {whose}: the largest difference is {} in layer {}, positions {} to {}",
            small(v),
            layers.get(y).copied().unwrap_or(0),
            edges.get(x).copied().unwrap_or(0),
            edges.get(x + 1).copied().unwrap_or(0).saturating_sub(1)
        ),
        None => format!("{part}, {whose}: nothing to compare"),
    };
    format!(
        "<figure><svg viewBox=\"0 0 {width} {height:.0}\" role=img aria-label=\"{}\">{body}</svg><figcaption>{} Layers downwards, positions to \
         the right.</figcaption></figure>\n",
        escape(&words),
        escape(&(words.clone() + "."))
    )
}

/// The largest of every layer, for those who do not see the colours.
fn worst_by_layer(parts: &[Value], edges: &[u64]) -> String {
    let mut out = String::new();
    for part in parts {
        let name = escape(part["part"].as_str().unwrap_or(""));
        let lines = |key: &str| -> Vec<Vec<Option<f64>>> {
            part[key].as_array().into_iter().flatten().filter_map(Value::as_str).map(numbers).collect()
        };
        let (ours, noise) = (lines("ours"), lines("noise"));
        let largest = |row: Option<&Vec<Option<f64>>>| {
            let values = row.into_iter().flatten().enumerate().filter_map(|(i, v)| Some((i, (*v)?)));
            values.max_by(|a, b| a.1.total_cmp(&b.1))
        };
        let _ = write!(
            out,
            "<div class=scroll role=region tabindex=0 aria-label=\"{name} by layer\"><table><thead><tr><th scope=col>{name}, layer</th><th \
             scope=col>largest of ours</th><th scope=col>at positions</th><th scope=col>largest of the server's own</th></tr></thead><tbody>"
        );
        for (i, layer) in part["layers"].as_array().into_iter().flatten().enumerate() {
            let (at, value) = largest(ours.get(i)).unwrap_or((0, 0.0));
            let own = largest(noise.get(i)).map_or("-".to_owned(), |(_, v)| small(v));
            let (from, to) = (edges.get(at).copied().unwrap_or(0), edges.get(at + 1).copied().unwrap_or(1));
            let _ = write!(
                out,
                "<tr><th scope=row>{layer}</th><td class=n>{}</td><td class=n>{from} to {}</td><td class=n>{own}</td></tr>",
                small(value),
                to.saturating_sub(1)
            );
        }
        out += "</tbody></table></div>";
    }
    out
}

/// Where the time of the longest request goes, beside the server's own prefill.
pub(crate) fn timeline(prompts: &[Value]) -> String {
    let with = prompts.iter().filter(|p| p["times"].is_object());
    let Some(p) = with.max_by_key(|p| p["n"].as_u64()) else { return String::new() };
    let t = &p["times"];
    let number = |v: &Value| v.as_f64().unwrap_or(0.0).max(0.0);
    let (process, load, prefill, write) =
        (number(&t["process_ms"]), number(&t["load_ms"]), number(&t["prefill_ms"]), number(&t["write_ms"]));
    let compute = (prefill - write).max(0.0);
    let start = (process - load - prefill).max(0.0);
    let steps = [
        ("start and end of the process", start, "--t5"),
        ("opening the model", load, "--t0"),
        ("layers", compute, "--t2"),
        ("writing rows and the file", write.min(prefill), "--t1"),
        ("restore", number(&p["restore_ms"]), "--t3"),
        ("the last token", number(&p["first_token_ms"]), "--t4"),
    ];
    let ours: f64 = steps.iter().map(|s| s.1).sum();
    let server = number(&p["server_prefill_ms"]);
    let most = ours.max(server).max(1e-9);
    let wide = |ms: f64| ms / most * (WIDTH - LEFT - 20.0);
    let mut body = String::new();
    let mut x = LEFT;
    let layers: Vec<f64> = t["layer_ms"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
    for (name, ms, colour) in steps {
        let w = wide(ms);
        let _ = write!(
            body,
            "<rect x={x:.1} y=10 width={w:.1} height=22 style=\"fill:var({colour})\"><title>{name}: {} ms</title></rect>",
            millis(ms)
        );
        if name == "layers" {
            // Lines between layers, in proportion.
            let sum: f64 = layers.iter().sum::<f64>().max(1e-9);
            let mut at = x;
            for ms in layers.iter().take(layers.len().saturating_sub(1)) {
                at += ms / sum * w;
                let _ = write!(
                    body,
                    "<line x1={at:.1} x2={at:.1} y1=10 y2=32 style=\"stroke:var(--bg);stroke-width:.7\"/>"
                );
            }
        }
        x += w;
    }
    let _ = write!(
        body,
        "<text x={:.0} y=26 text-anchor=end>handed over</text><text x={:.0} y=58 text-anchor=end>server alone</text>\
         <rect x={LEFT} y=42 width={:.1} height=22 style=\"fill:var(--own)\"/><text class=soft x={LEFT} y=80>0</text>\
         <text class=soft x={:.0} y=80 text-anchor=end>{} ms</text>",
        LEFT - 8.0,
        LEFT - 8.0,
        wide(server),
        WIDTH - 20.0,
        millis(most)
    );
    let list: Vec<String> = steps.iter().map(|(n, ms, _)| format!("{n} {} ms", millis(*ms))).collect();
    let words = format!(
        "Handed over: {}; {} ms in all. The server's own prefill: {} ms.",
        list.join(", "),
        millis(ours),
        millis(server)
    );
    let mut key = String::from("<ul class=key aria-hidden=true>");
    for (name, _, colour) in steps {
        let _ = write!(key, "<li><i style=\"background:var({colour})\"></i>{name}");
    }
    let _ = writeln!(key, "<li><i style=\"background:var(--own)\"></i>the server's own prefill</ul>");
    let prompt = p["prompt"].as_str().unwrap_or("");
    format!("<h4>A request in time: prompt {}, {} tokens</h4>\n", escape(prompt), p["n"])
        + &key
        + &figure(
            84.0,
            &words,
            &body,
            &format!(
                "{words} One thread each, other cases beside it: no benchmark. Lines in the blue part are layers."
            ),
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_by_powers_of_ten() {
        assert_eq!([0.0, 1e-7, 1e-6, 2e-5, 5e-3, 0.02, 0.5].map(class), [0, 0, 1, 2, 5, 6, 7]);
    }

    #[test]
    fn axes_hold_what_is_drawn() {
        assert_eq!(decades([0.0, 2e-5, 3e-3].into_iter()), (-5.0, -2.0));
        assert_eq!(decades([0.0, f64::NAN].into_iter()), (-1.0, 0.0));
        assert!((on_log(1e-2, -5.0, -2.0) - (WIDTH - 20.0)).abs() < 1e-9);
        assert_eq!(on_log(0.0, -5.0, -2.0), LEFT);
    }
}
