//! Rust source reduced to what is executed, so that a rule about `println!` does not trip over a comment about it. A scanner,
//! not a parser: it knows comments, literals and braces, and keeps every line where it was.

/// The source with comments and the insides of literals blanked out.
pub fn code_only(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut out = bytes.to_vec();
    let mut i = 0;
    while i < bytes.len() {
        let end = match bytes[i] {
            b'/' if bytes.get(i + 1) == Some(&b'/') => find(bytes, i, b"\n").unwrap_or(bytes.len()),
            b'/' if bytes.get(i + 1) == Some(&b'*') => block_comment(bytes, i),
            b'"' => string(bytes, i + 1),
            b'r' if !continues_word(bytes, i) => match raw_string(bytes, i) {
                Some(end) => end,
                None => i,
            },
            // A character, or a lifetime, which has no closing quote.
            b'\'' => character(bytes, i).unwrap_or(i),
            _ => i,
        };
        for b in &mut out[i..end] {
            if *b != b'\n' {
                *b = b' ';
            }
        }
        i = end.max(i + 1);
    }
    // Blanking whole sequences leaves valid text; what is outside of them is untouched.
    String::from_utf8(out).unwrap_or_default()
}

/// The same without items under `#[cfg(test)]`.
pub fn shipped(source: &str) -> String {
    let mut code = code_only(source).into_bytes();
    let mark = b"#[cfg(test)]";
    let mut from = 0;
    while let Some(start) = find(&code, from, mark) {
        let body = code[start..].iter().position(|b| *b == b'{' || *b == b';').map_or(code.len(), |p| start + p);
        let end = if code.get(body) == Some(&b'{') { matching(&code, body) } else { body };
        for b in &mut code[start..end] {
            if *b != b'\n' {
                *b = b' ';
            }
        }
        from = end.max(start + 1);
    }
    String::from_utf8(code).unwrap_or_default()
}

/// The string literals of a source: where each begins, and what it says. Bytes and characters are none.
pub fn literals(source: &str) -> Vec<(usize, String)> {
    let bytes = source.as_bytes();
    let mut found = Vec::new();
    let mut i = 0;
    while i < bytes.len() {
        let (end, text) = match bytes[i] {
            b'/' if bytes.get(i + 1) == Some(&b'/') => (find(bytes, i, b"\n").unwrap_or(bytes.len()), None),
            b'/' if bytes.get(i + 1) == Some(&b'*') => (block_comment(bytes, i), None),
            b'"' => {
                let end = string(bytes, i + 1);
                (end, source.get(i + 1..end - 1).map(unescaped))
            }
            b'r' if !continues_word(bytes, i) => match raw_string(bytes, i) {
                Some(end) => {
                    let hashes = bytes[i + 1..].iter().take_while(|b| **b == b'#').count();
                    (end, source.get(i + 2 + hashes..end - 1 - hashes).map(str::to_owned))
                }
                None => (i, None),
            },
            b'\'' => (character(bytes, i).unwrap_or(i), None),
            _ => (i, None),
        };
        found.extend(text.map(|t| (i, t)));
        i = end.max(i + 1);
    }
    found
}

/// A literal as the compiler reads it, as far as messages use escapes.
fn unescaped(literal: &str) -> String {
    let mut out = String::new();
    let mut chars = literal.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('n') => out.push('\n'),
            // The line goes on at the next character that is no space.
            Some('\n') => while chars.next_if(|c| c.is_whitespace()).is_some() {},
            Some(c) => out.push(c),
            None => {}
        }
    }
    out
}

/// The byte after the bracket that closes the one at `open`, in code without literals.
pub fn closing(code: &str, open: usize) -> usize {
    let mut depth = 0usize;
    for (i, b) in code.bytes().enumerate().skip(open) {
        match b {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return i + 1;
                }
            }
            _ => {}
        }
    }
    code.len()
}

/// Lines (from 1) of `code` in which `word` stands for itself, not as a part of a longer name. What is not a letter at an end
/// of `word` needs no border there.
pub fn lines_with<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    code.lines().enumerate().filter(|(_, line)| has_word(line, word)).map(|(i, _)| i + 1)
}

/// Whether `word` stands in `line` for itself.
pub fn has_word(line: &str, word: &str) -> bool {
    let name = |b: Option<&u8>| b.is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
    let (line, needle) = (line.as_bytes(), word.as_bytes());
    let mut from = 0;
    while let Some(at) = find(line, from, needle) {
        let before = name(needle.first()) && at > 0 && name(line.get(at - 1));
        let after = name(needle.last()) && name(line.get(at + needle.len()));
        if !before && !after {
            return true;
        }
        from = at + 1;
    }
    false
}

fn find(bytes: &[u8], from: usize, needle: &[u8]) -> Option<usize> {
    let rest = bytes.get(from..)?;
    rest.windows(needle.len()).position(|w| w == needle).map(|p| from + p)
}

fn continues_word(bytes: &[u8], at: usize) -> bool {
    // `br"` is a raw string too; any other letter before an `r` makes it a part of a name.
    match at.checked_sub(1).map(|p| bytes[p]) {
        Some(b'b') => at.checked_sub(2).is_some_and(|p| bytes[p].is_ascii_alphanumeric() || bytes[p] == b'_'),
        Some(b) => b.is_ascii_alphanumeric() || b == b'_',
        None => false,
    }
}

fn block_comment(bytes: &[u8], start: usize) -> usize {
    let (mut depth, mut i) = (0usize, start);
    while i < bytes.len() {
        match &bytes[i..bytes.len().min(i + 2)] {
            b"/*" => {
                depth += 1;
                i += 2;
            }
            b"*/" => {
                depth -= 1;
                i += 2;
                if depth == 0 {
                    return i;
                }
            }
            _ => i += 1,
        }
    }
    bytes.len()
}

fn string(bytes: &[u8], mut i: usize) -> usize {
    while i < bytes.len() {
        match bytes[i] {
            b'\\' => i += 2,
            b'"' => return i + 1,
            _ => i += 1,
        }
    }
    bytes.len()
}

fn raw_string(bytes: &[u8], start: usize) -> Option<usize> {
    let hashes = bytes[start + 1..].iter().take_while(|b| **b == b'#').count();
    let open = start + 1 + hashes;
    (bytes.get(open) == Some(&b'"')).then_some(())?;
    let close = [b"\"".as_slice(), &vec![b'#'; hashes]].concat();
    Some(find(bytes, open + 1, &close).map_or(bytes.len(), |at| at + close.len()))
}

fn character(bytes: &[u8], start: usize) -> Option<usize> {
    if bytes.get(start + 1) == Some(&b'\\') {
        return find(bytes, start + 3, b"'").map(|at| at + 1);
    }
    // One character of any length in UTF-8, then the quote.
    let text = std::str::from_utf8(&bytes[start + 1..]).ok()?;
    let len = text.chars().next()?.len_utf8();
    (bytes.get(start + 1 + len) == Some(&b'\'')).then_some(start + 2 + len)
}

fn matching(code: &[u8], open: usize) -> usize {
    let mut depth = 0usize;
    for (i, b) in code.iter().enumerate().skip(open) {
        match b {
            b'{' => depth += 1,
            b'}' => {
                depth -= 1;
                if depth == 0 {
                    return i + 1;
                }
            }
            _ => {}
        }
    }
    code.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked_and_lines_kept() {
        let source = "a // println!\n/* x /* y */\nz */ b\n\"println! \\\" \" c\nr#\"say \"x\" {\"# d\n'{' 'a: '\\'' 'é' e br\"{\" for\"r\" r\n";
        let code = code_only(source);
        assert_eq!(code.lines().count(), source.lines().count());
        assert!(!code.contains("println") && !code.contains('{'));
        for (i, want) in ["a", "", "b", "c", "d", "'a:"].iter().enumerate() {
            assert!(code.lines().nth(i).unwrap().contains(want), "line {i}: {code}");
        }
        assert!(code.lines().nth(5).unwrap().trim_end().ends_with("r"), "{code}");
    }

    #[test]
    fn items_of_tests_are_left_out() {
        let code =
            shipped("fn a() { x }\n#[cfg(test)]\nmod tests {\n fn b() { dbg }\n}\n#[cfg(test)]\nuse y;\nfn c() {}\n");
        assert!(code.contains("fn a") && code.contains("fn c"));
        assert!(!code.contains("dbg") && !code.contains("use y"));
        assert_eq!(lines_with(&code, "fn").collect::<Vec<_>>(), [1, 8]);
    }

    #[test]
    fn literals_are_read_as_the_compiler_reads_them() {
        let source = "f(\"a \\\"b\\\" {x}\", r#\"c \"d\"\"#); // \"no\"\nlet e = \"two \\\n    lines\"; '\"' 'x: \"f\"";
        let found: Vec<String> = literals(source).into_iter().map(|(_, t)| t).collect();
        assert_eq!(found, ["a \"b\" {x}", "c \"d\"", "two lines", "f"]);
        assert_eq!(closing("f(a, (b), [c]) d", 1), 14);
    }

    #[test]
    fn words_have_borders() {
        assert!(has_word("unsafe {", "unsafe") && has_word("x(unsafe)", "unsafe"));
        assert!(!has_word("unsafe_code", "unsafe") && !has_word("not_unsafe", "unsafe"));
        assert!(has_word("std::println!(x)", "println!") && !has_word("eprintln!(x)", "println!"));
        assert!(has_word("unsafe_code unsafe", "unsafe"));
    }
}
