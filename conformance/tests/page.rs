//! The HTML report of a real run, as a real browser sees it: no message on the console, every number that of the JSON, nothing
//! wider than the screen of a phone, a sentence for every picture.
//!
//! Needs a Chromium, hence by name only: `.ci/run` runs it.

use std::path::{Path, PathBuf};
use std::process::Command;

use conformance::cases;
use conformance::pins::{Cache, Pins};
use conformance::producer::Choice;
use conformance::run::{self, Context};
use conformance::{html, locate, report};
use serde_json::Value;

fn chromium() -> PathBuf {
    let names = ["chromium", "chromium-browser", "google-chrome-stable", "google-chrome"];
    let dirs: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect();
    let found = names.iter().flat_map(|n| dirs.iter().map(move |d| d.join(n))).find(|p| p.is_file());
    found.expect("no Chromium on the PATH: install the distribution's package `chromium`")
}

/// What the browser has made of a page, and what it said.
fn open(page: &Path, width: u32, more: &[&str]) -> (String, String) {
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new(chromium())
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"])
        .args(["--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--hide-scrollbars"])
        .arg(format!("--window-size={width},900"))
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(more)
        .arg("--dump-dom")
        .arg(format!("file://{}", page.display()))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    (String::from_utf8(output.stdout).unwrap(), said)
}

/// A real run of a few cases: one that passes with all there is to see, one of another model, one that fails.
fn a_report() -> Value {
    let pins = Pins::load().unwrap();
    let all = cases::all(&pins).unwrap();
    let cases: Vec<_> = ["tiny/tiny-llama-f16/v4", "tiny/tiny-gemma3-f32/v3"]
        .iter()
        .map(|id| {
            let mut case = all.iter().find(|c| c.id() == **id).unwrap().clone();
            case.prompts = ["two", "lighthouse", "log-600"].map(str::to_owned).to_vec();
            case.greedy = 8;
            case
        })
        .collect();
    let program = locate::provider_for_tests().unwrap();
    let cache = Cache::open().unwrap();
    let context = Context {
        pins,
        cache,
        producer: Choice::Provider(program.clone()),
        server: None,
        references: None,
        kernels: None,
        keep: None,
    };
    let mut reports: Vec<_> = cases.iter().map(|c| run::run_case(&context, c)).collect();
    // One that is wrong, to see that it is shown so; its reasons are not for a browser to interpret.
    let mut wrong = reports[0].clone();
    wrong.id = "tiny/<b>wrong</b>/v4".into();
    wrong.verdict = run::Verdict::Fail;
    wrong.reasons = vec!["<script>console.error('taken for markup')</script>".into()];
    reports.push(wrong);
    let versions = report::versions(&context.pins, &cases, Some(&program), None);
    serde_json::to_value(report::report(&reports, 1.0, versions)).unwrap()
}

/// Elements that carry `attribute`: its value, and the text up to the next tag.
fn marked<'a>(dom: &'a str, attribute: &str) -> Vec<(&'a str, &'a str)> {
    let mark = format!("{attribute}=\"");
    let pieces = dom.split(&mark).skip(1);
    pieces
        .map(|p| {
            let (value, rest) = p.split_once('"').unwrap();
            let text = rest.split_once('>').unwrap().1;
            (value, text.split('<').next().unwrap())
        })
        .collect()
}

/// Whether a number is shown as it is: times to a tenth of a millisecond, the rest with three digits.
fn close(pointer: &str, shown: &str, value: f64) -> bool {
    let shown: f64 = match shown {
        "none" => return !value.is_finite(),
        shown => shown.parse().unwrap(),
    };
    let step = match pointer.ends_with("_ms") {
        true if value >= 100.0 => 1.0,
        true => 0.1,
        false if (0.01..1000.0).contains(&value) => 0.001,
        false => 0.01 * 10f64.powf(value.max(f64::MIN_POSITIVE).log10().floor()),
    };
    (shown - value).abs() <= 0.5001 * step
}

#[test]
#[ignore = "needs a Chromium; .ci/run runs it"]
fn a_browser_shows_what_the_json_says() {
    let report = a_report();
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("report.html");
    let text = html::page(&report).unwrap();
    std::fs::write(&page, &text).unwrap();
    let (dom, said) = open(&page, 1200, &[]);
    assert!(!said.contains("CONSOLE"), "{said}");

    // Numbers, by their places in the JSON.
    let numbers = marked(&dom, "data-json");
    assert!(numbers.len() > 100, "{}", numbers.len());
    for (pointer, shown) in &numbers {
        let value = report.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("nothing at {pointer}"));
        assert!(close(pointer, shown, value), "{pointer}: {shown} is shown for {value}");
    }
    for (pointer, shown) in marked(&dom, "data-sum") {
        let prompts = report.pointer(pointer).and_then(Value::as_array).unwrap();
        let sum = |key: &str| prompts.iter().filter_map(|p| p[key].as_f64()).sum::<f64>();
        assert!(["prefill_ms", "server_prefill_ms"].iter().any(|k| close(k, shown, sum(k))), "{pointer}: {shown}");
    }
    // The largest difference of the picture is that of the JSON.
    let heat = &report["cases"][0]["heat"]["parts"][0];
    let all = heat["ours"].as_array().unwrap().iter().flat_map(|l| l.as_str().unwrap().split(' '));
    let worst = all.filter_map(|w| w.parse::<f64>().ok()).fold(0.0, f64::max);
    let said = dom.split("aria-label=\"K, ours: the largest difference is ").nth(1).unwrap();
    assert!(close("", said.split(' ').next().unwrap(), worst), "{worst}");

    // A sentence for every picture; what scrolls can be reached by keyboard and has a name.
    let pictures: Vec<&str> = dom.split("<svg").skip(1).collect();
    assert!(pictures.len() >= 10, "{}", pictures.len());
    for p in pictures {
        let tag = p.split('>').next().unwrap();
        let label = tag.split("aria-label=\"").nth(1).and_then(|l| l.split('"').next()).unwrap_or("");
        assert!(tag.contains("role=\"img\"") && label.len() > 30, "{tag}");
    }
    for s in dom.split("<div class=\"scroll\"").skip(1) {
        let tag = s.split('>').next().unwrap();
        assert!(
            tag.contains("tabindex=\"0\"") && tag.contains("role=\"region\"") && tag.contains("aria-label="),
            "{tag}"
        );
    }
    assert!(dom.contains("✗ fail") && dom.contains("✓ pass") && dom.contains("lang=\"en\""));

    // Nothing of a report is markup, and nothing is fetched.
    assert!(!dom.contains("<script") && !dom.contains("<b>wrong"));
    for attribute in ["src=\"", "href=\"http", "url(", "@import"] {
        assert!(!text.contains(attribute), "{attribute}");
    }

    // On a phone nothing is wider than the screen, with every part unfolded. The page has no script; this copy has one.
    let phone = dir.path().join("phone.html");
    let ask = "<script>document.querySelectorAll('details').forEach(d => d.open = true);\
               document.body.dataset.wide = document.documentElement.scrollWidth + ' of ' + window.innerWidth;</script></body>";
    std::fs::write(&phone, text.replace("</body>", ask)).unwrap();
    for more in [&[][..], &["--blink-settings=preferredColorScheme=0"]] {
        let (dom, _) = open(&phone, 500, more);
        let wide = dom.split("data-wide=\"").nth(1).and_then(|w| w.split('"').next()).unwrap();
        let (page, screen) = wide.split_once(" of ").unwrap();
        assert!(page.parse::<u32>().unwrap() <= screen.parse::<u32>().unwrap(), "{wide}");
    }
}
