//! The book: mdBook over `docs/`, with `ARCHITECTURE.md` and the changelog in it. The pages link to each other as they lie in the
//! tree, so they are copied as they lie, and every link of what comes out is followed.

use crate::tools::{MDBOOK, run};
use crate::tree::Tree;
use anyhow::{Context as _, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The list of chapters, as seen from `docs/`.
const SUMMARY: &str = "docs/SUMMARY.md";

/// Builds it under `target/book`, and says which links lead nowhere. True when all lead somewhere.
pub fn build(root: &Path) -> Result<bool> {
    let tree = Tree::read(root)?;
    let place = root.join("target/book");
    if place.exists() {
        std::fs::remove_dir_all(&place).with_context(|| format!("removing {}", place.display()))?;
    }
    let put = |path: &str, text: &[u8]| -> Result<()> {
        let full = place.join(path);
        if let Some(dir) = full.parent() {
            std::fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        }
        std::fs::write(&full, text).with_context(|| format!("writing {}", full.display()))
    };
    put("book.toml", tree.text("book.toml").as_bytes())?;
    put("src/SUMMARY.md", (summary(tree.text(SUMMARY)) + &further(&tree)).as_bytes())?;
    for file in tree.files.iter().filter(|f| belongs(&f.path) && f.path != SUMMARY) {
        let bytes = std::fs::read(root.join(&file.path)).with_context(|| format!("reading {}", file.path))?;
        match &file.text {
            Some(text) if file.path.ends_with(".md") => {
                put(&format!("src/{}", named(&file.path)), named(text).as_bytes())?
            }
            _ => put(&format!("src/{}", file.path), &bytes)?,
        }
    }
    let program = MDBOOK.get()?;
    run(Command::new(program).arg("build"), &place)?;
    let complaints = dead_links(&place.join("html"))?;
    complaints.iter().for_each(|c| eprintln!("{c}"));
    if complaints.is_empty() {
        println!("target/book/html/index.html written, every link in it leads somewhere");
    }
    Ok(complaints.is_empty())
}

fn belongs(path: &str) -> bool {
    let text = [".md", ".svg", ".csv", ".png"].iter().any(|e| path.ends_with(e));
    (path.starts_with("docs/") && text)
        || ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE-APACHE", "LICENSE-MIT"].contains(&path)
}

/// mdBook makes an index of every `README.md` and leaves the links to it as they were.
fn named(text: &str) -> String {
    text.replace("README.md", "introduction.md")
}

/// The list of chapters as seen from the root.
fn summary(text: &str) -> String {
    let text = named(text);
    let lines = text.lines().map(|line| match line.split_once("](") {
        Some((name, target)) => match target.strip_prefix("../") {
            Some(outer) => format!("{name}]({outer}"),
            None => format!("{name}](docs/{target}"),
        },
        None => line.to_owned(),
    });
    lines.map(|l| l + "\n").collect()
}

/// Pages that no chapter leads to, as chapters at the end: a new page is in the book before somebody finds it a better place.
fn further(tree: &Tree) -> String {
    let listed = tree.text(SUMMARY);
    let pages = tree.with_suffix(".md").filter_map(|(path, text)| Some((path, path.strip_prefix("docs/")?, text)));
    let lines: String = pages
        .filter(|(path, name, _)| *path != SUMMARY && !listed.contains(&format!("]({name})")))
        .map(|(path, name, text)| {
            let title = text.lines().find_map(|l| l.strip_prefix("# ")).unwrap_or(name);
            format!("- [{}]({path})\n", title.trim())
        })
        .collect();
    if lines.is_empty() { lines } else { format!("\n# Further pages\n\n{lines}") }
}

/// Links of the pages under `html` that lead nowhere.
fn dead_links(html: &Path) -> Result<Vec<String>> {
    let mut pages = BTreeMap::new();
    collect(html, html, &mut pages)?;
    let ids: BTreeMap<&str, BTreeSet<&str>> =
        pages.iter().map(|(name, text)| (name.as_str(), attributes(text, "id").collect())).collect();
    let mut dead = Vec::new();
    for (name, text) in &pages {
        // The page for printing repeats all others; the one for lost readers is made for any place.
        if ["print.html", "404.html", "toc.html"].contains(&name.as_str()) {
            continue;
        }
        for target in attributes(text, "href").chain(attributes(text, "src")) {
            if target.contains("://") || ["mailto:", "data:", "javascript:"].iter().any(|s| target.starts_with(s)) {
                continue;
            }
            let (file, fragment) = target.split_once('#').map_or((target, ""), |(f, a)| (f, a));
            let to = if file.is_empty() { name.clone() } else { resolve(name, file) };
            if !html.join(&to).is_file() {
                dead.push(format!("{name}: the link to {target} leads nowhere"));
            } else if !fragment.is_empty() && ids.get(to.as_str()).is_some_and(|ids| !ids.contains(fragment)) {
                dead.push(format!("{name}: {to} has no #{fragment}"));
            }
        }
    }
    Ok(dead)
}

fn collect(root: &Path, dir: &Path, pages: &mut BTreeMap<String, String>) -> Result<()> {
    for entry in std::fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))? {
        let path: PathBuf = entry?.path();
        if path.is_dir() {
            collect(root, &path, pages)?;
        } else if path.extension().is_some_and(|e| e == "html")
            && let Some(name) = path.strip_prefix(root).ok().and_then(Path::to_str)
        {
            let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            pages.insert(name.to_owned(), text);
        }
    }
    Ok(())
}

fn attributes<'a>(html: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    html.split('<').filter(|tag| tag.starts_with(|c: char| c.is_ascii_alphabetic())).filter_map(move |tag| {
        let tag = tag.split('>').next()?;
        tag.split_once(&format!(" {name}=\""))?.1.split('"').next()
    })
}

fn resolve(from: &str, to: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in to.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            name => parts.push(name),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chapters_are_seen_from_the_root() {
        assert_eq!(
            summary("# S\n- [A](a.md)\n  - [B](../README.md)\n"),
            "# S\n- [A](docs/a.md)\n  - [B](introduction.md)\n"
        );
    }

    #[test]
    fn links_are_read_from_tags_only() {
        let html = "<a class=\"x\" href=\"a.html#b\">href=\"no\"</a><h2 id=\"b\">t</h2><img src=\"c.svg\">";
        assert_eq!(attributes(html, "href").collect::<Vec<_>>(), ["a.html#b"]);
        assert_eq!(attributes(html, "id").collect::<Vec<_>>(), ["b"]);
        assert_eq!(attributes(html, "src").collect::<Vec<_>>(), ["c.svg"]);
        assert_eq!(resolve("docs/a/b.html", "../c.html"), "docs/c.html");
    }

    #[test]
    fn a_page_without_a_chapter_becomes_one() {
        let tree = Tree::of(&[("docs/SUMMARY.md", "- [A](a.md)\n"), ("docs/a.md", ""), ("docs/b.md", "x\n# B page\n")]);
        assert_eq!(further(&tree), "\n# Further pages\n\n- [B page](docs/b.md)\n");
    }
}
