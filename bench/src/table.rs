//! Tables for people: Markdown whose columns line up, so that one can be read in a terminal and pasted into a page.

/// The rows under the head; the first column stands left, all others right.
pub fn markdown(head: &[&str], rows: &[Vec<String>]) -> String {
    let cell = |row: usize, column: usize| match row {
        0 => head[column],
        _ => rows[row - 1].get(column).map_or("", String::as_str),
    };
    let width = |column: usize| (0..=rows.len()).map(|row| cell(row, column).chars().count()).max().unwrap_or(0).max(2);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut out = String::new();
    for row in 0..=rows.len() {
        for (column, &w) in widths.iter().enumerate() {
            let text = cell(row, column);
            out += &if column == 0 { format!("| {text:<w$} |") } else { format!(" {text:>w$} |") };
        }
        out.push('\n');
        if row == 0 {
            for (column, &w) in widths.iter().enumerate() {
                out +=
                    &if column == 0 { format!("|{}|", "-".repeat(w + 2)) } else { format!("{}:|", "-".repeat(w + 1)) };
            }
            out.push('\n');
        }
    }
    out
}

/// A number with so many decimals, `-` where there is none.
pub fn number(value: Option<f64>, decimals: usize) -> String {
    value.filter(|v| v.is_finite()).map_or("-".to_owned(), |v| format!("{v:.decimals$}"))
}

/// A share as a percentage, `-` where there is none.
pub fn percent(value: Option<f64>, decimals: usize) -> String {
    value.filter(|v| v.is_finite()).map_or("-".to_owned(), |v| format!("{:.decimals$} %", v * 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [vec!["a".to_owned(), "10.5".to_owned()], vec!["model".to_owned()]];
        let want = "| what  |    n |\n|-------|-----:|\n| a     | 10.5 |\n| model |      |\n";
        assert_eq!(markdown(&["what", "n"], &rows), want);
    }

    #[test]
    fn what_is_not_known_is_a_dash() {
        assert_eq!(number(Some(1.25), 1), "1.2");
        assert_eq!(number(None, 1), "-");
        assert_eq!(number(Some(f64::INFINITY), 1), "-");
        assert_eq!(percent(Some(0.125), 1), "12.5 %");
        assert_eq!(percent(Some(f64::NAN), 0), "-");
    }
}
