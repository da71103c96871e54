//! The tree as it would be committed: names, sizes and text. Nothing is judged here.

use anyhow::{Context as _, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// One file.
pub struct File {
    /// Path from the root, with `/`.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// Contents, of a file that is UTF-8.
    pub text: Option<String>,
}

/// All files.
pub struct Tree {
    /// By ascending path.
    pub files: Vec<File>,
}

impl Tree {
    /// Reads the tree at `root`: what git tracks or would track. Without git (a copy from an archive) it is everything but
    /// build output and hidden directories other than our own.
    pub fn read(root: &Path) -> Result<Tree> {
        let names = match tracked(root) {
            Some(names) => names,
            None => {
                let mut names = Vec::new();
                walk(root, Path::new(""), &mut names)?;
                names
            }
        };
        let mut files = Vec::new();
        for path in names {
            let full = root.join(&path);
            // A file that is deleted but not yet committed so, and a link to a directory, have nothing to be read.
            let Ok(meta) = std::fs::metadata(&full) else { continue };
            if !meta.is_file() {
                continue;
            }
            let bytes = std::fs::read(&full).with_context(|| format!("reading {path}"))?;
            files.push(File { path, size: meta.len(), text: String::from_utf8(bytes).ok() });
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        files.dedup_by(|a, b| a.path == b.path);
        anyhow::ensure!(files.iter().any(|f| f.path == "Cargo.toml"), "{} holds no Cargo.toml", root.display());
        Ok(Tree { files })
    }

    /// The file of that name.
    pub fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|f| f.path == path)
    }

    /// The text of the file of that name; empty where there is none.
    pub fn text(&self, path: &str) -> &str {
        self.file(path).and_then(|f| f.text.as_deref()).unwrap_or("")
    }

    /// Whether there is such a file, or a directory with files in it.
    pub fn exists(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        self.files
            .iter()
            .any(|f| f.path.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
    }

    /// Text files with that ending.
    pub fn with_suffix<'a>(&'a self, suffix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.files
            .iter()
            .filter(move |f| f.path.ends_with(suffix))
            .filter_map(|f| f.text.as_deref().map(|text| (f.path.as_str(), text)))
    }

    /// A tree for tests.
    #[cfg(test)]
    pub fn of(files: &[(&str, &str)]) -> Tree {
        let file = |(path, text): &(&str, &str)| File {
            path: (*path).to_owned(),
            size: text.len() as u64,
            text: Some((*text).to_owned()),
        };
        Tree { files: files.iter().map(file).collect() }
    }
}

fn tracked(root: &Path) -> Option<Vec<String>> {
    let git = |args: &[&str]| {
        let out = Command::new("git").arg("-C").arg(root).args(args).output().ok()?;
        out.status.success().then_some(())?;
        String::from_utf8(out.stdout).ok()
    };
    // Inside someone else's repository our files may all be ignored.
    let top = git(&["rev-parse", "--show-toplevel"])?;
    if Path::new(top.trim_end()).canonicalize().ok()? != root.canonicalize().ok()? {
        return None;
    }
    let list = git(&["ls-files", "-z", "--cached", "--others", "--exclude-standard"])?;
    Some(list.split('\0').filter(|s| !s.is_empty()).map(str::to_owned).collect())
}

fn walk(root: &Path, dir: &Path, names: &mut Vec<String>) -> Result<()> {
    let full = root.join(dir);
    for entry in std::fs::read_dir(&full).with_context(|| format!("reading {}", full.display()))? {
        let entry = entry?;
        let name = entry.file_name();
        let path: PathBuf = dir.join(&name);
        let hidden = name.as_encoded_bytes().starts_with(b".") && name != ".ci" && name != ".cargo";
        if entry.file_type()?.is_dir() {
            if name != "target" && !hidden {
                walk(root, &path, names)?;
            }
        } else if let Some(path) = path.to_str() {
            names.push(path.to_owned());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_exist_by_their_files() {
        let tree = Tree::of(&[("docs/a.md", "x"), ("docs.md", "y")]);
        assert!(tree.exists("docs") && tree.exists("docs/") && tree.exists("docs/a.md") && tree.exists("docs.md"));
        assert!(!tree.exists("doc") && !tree.exists("docs/b.md") && !tree.exists("docs/a"));
        assert_eq!((tree.text("docs.md"), tree.text("none")), ("y", ""));
    }
}
