//! Tables for machines. Rows are added to the file one by one, as they are measured: what was measured before an
//! interruption is kept, and one file can gather the runs of many days.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// Where rows go.
pub struct Csv {
    path: PathBuf,
    columns: usize,
    file: File,
}

impl Csv {
    /// Opens the file at `path` for more rows; a new or empty one gets the line of names first.
    ///
    /// # Errors
    /// The file cannot be opened, or holds rows of other columns.
    pub fn open(path: &Path, names: &[&str]) -> Result<Csv> {
        let head = line(names);
        let before = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(e).with_context(|| format!("reading {}", path.display())),
        };
        let first = before.lines().next().unwrap_or("");
        if !before.is_empty() && first != head.trim_end() {
            bail!(
                "{} begins with the columns {first:?}, but these rows have {:?}; give another file with --csv",
                path.display(),
                head.trim_end()
            );
        }
        let opened = OpenOptions::new().create(true).append(true).open(path);
        let file = opened.with_context(|| format!("opening {} to add rows", path.display()))?;
        let mut csv = Csv { path: path.to_owned(), columns: names.len(), file };
        if before.is_empty() {
            csv.put(&head)?;
        } else if !before.ends_with('\n') {
            // A row that was cut off by an interruption stays a row of its own.
            csv.put("\n")?;
        }
        Ok(csv)
    }

    /// [`Csv::open`] where a path was given.
    ///
    /// # Errors
    /// As there.
    pub fn open_if(path: Option<&Path>, names: &[&str]) -> Result<Option<Csv>> {
        path.map(|path| Csv::open(path, names)).transpose()
    }

    /// Adds a row.
    ///
    /// # Errors
    /// The write fails, or the row has another number of cells than the file has columns.
    pub fn row(&mut self, cells: &[String]) -> Result<()> {
        if cells.len() != self.columns {
            bail!("a row of {} cells for the {} columns of {}", cells.len(), self.columns, self.path.display());
        }
        let line = line(cells);
        self.put(&line)
    }

    fn put(&mut self, text: &str) -> Result<()> {
        // At once, so that a row stands there whole or not at all.
        self.file.write_all(text.as_bytes()).with_context(|| format!("writing {}", self.path.display()))
    }
}

/// One line, its cells quoted where they have to be.
fn line<S: AsRef<str>>(cells: &[S]) -> String {
    let cells: Vec<String> = cells.iter().map(|c| quoted(c.as_ref())).collect();
    cells.join(",") + "\n"
}

/// A cell as RFC 4180 has it, save for line breaks: they become spaces, since rows are read line by line here and elsewhere.
fn quoted(cell: &str) -> String {
    let cell = cell.replace(['\r', '\n'], " ");
    let plain = !cell.contains([',', '"']) && cell.trim() == cell;
    if plain { cell } else { format!("\"{}\"", cell.replace('"', "\"\"")) }
}

/// A number with so many decimals, an empty cell where there is none.
pub fn number(value: Option<f64>, decimals: usize) -> String {
    value.filter(|v| v.is_finite()).map_or(String::new(), |v| format!("{v:.decimals$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_quoted_where_they_have_to_be() {
        assert_eq!(quoted("Q4_0"), "Q4_0");
        assert_eq!(quoted(""), "");
        assert_eq!(quoted("a,b"), "\"a,b\"");
        assert_eq!(quoted("12\" disk"), "\"12\"\" disk\"");
        assert_eq!(quoted(" edge"), "\" edge\"");
        assert_eq!(quoted("two\nlines"), "two lines");
        assert_eq!(line(&["Intel(R) Xeon(R)", "1,5", "x"]), "Intel(R) Xeon(R),\"1,5\",x\n");
    }

    #[test]
    fn rows_gather_under_one_head() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.csv");
        for n in 1..=2 {
            let mut csv = Csv::open(&path, &["model", "n"]).unwrap();
            csv.row(&["a,b".into(), n.to_string()]).unwrap();
            assert!(csv.row(&["short".into()]).unwrap_err().to_string().contains("1 cells for the 2 columns"));
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "model,n\n\"a,b\",1\n\"a,b\",2\n");
    }

    #[test]
    fn a_file_of_other_columns_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.csv");
        fs::write(&path, "something,else\n").unwrap();
        let error = Csv::open(&path, &["model", "n"]).err().unwrap().to_string();
        assert!(error.contains("something,else") && error.contains("--csv"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "something,else\n");
    }

    #[test]
    fn a_line_that_was_cut_off_does_not_spoil_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.csv");
        fs::write(&path, "n\n1\n2").unwrap();
        Csv::open(&path, &["n"]).unwrap().row(&["3".into()]).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "n\n1\n2\n3\n");
    }
}
