//! What is printed: plain where nobody looks, coloured on a terminal. A reader that went away is no error.

use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _};

/// How to print.
pub struct Show {
    colour: bool,
}

impl Show {
    /// Colours unless that is unwanted or stdout is no terminal.
    pub fn new(plain: bool) -> Show {
        Show { colour: !plain && std::io::stdout().is_terminal() }
    }

    /// One line.
    pub fn line(&self, text: impl Display) {
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{text}").and_then(|()| out.flush());
    }

    fn paint(&self, code: u8, text: impl Display) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() }
    }

    /// A good word.
    pub fn good(&self, text: impl Display) -> String {
        self.paint(32, text)
    }

    /// A bad one.
    pub fn bad(&self, text: impl Display) -> String {
        self.paint(31, text)
    }

    /// An aside.
    pub fn dim(&self, text: impl Display) -> String {
        self.paint(2, text)
    }
}

/// Columns under one another, the first to the left and the others to the right.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> Vec<String> {
    let width = |i: usize| {
        let cells = rows.iter().map(|r| r[i].chars().count());
        cells.chain([head[i].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: &[String]| {
        let mut out = String::new();
        for (i, (cell, width)) in cells.iter().zip(&widths).enumerate() {
            out += &if i == 0 { format!("{cell:width$}") } else { format!("  {cell:>width$}") };
        }
        out.trim_end().to_owned()
    };
    let head: Vec<String> = head.iter().map(|h| (*h).to_owned()).collect();
    std::iter::once(line(&head)).chain(rows.iter().map(|r| line(r))).collect()
}
