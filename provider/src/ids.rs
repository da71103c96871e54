//! The ids file: which token ids the prompt has. Its encoding is nobody's contract, so four are read:
//!
//! * text: decimal integers separated by white space, commas, or a comma with white space around it. A UTF-8 byte order
//!   mark, CRLF, a trailing newline and a trailing comma are fine. Signs, fractions, other bases and two commas without
//!   an id between them are not;
//! * a JSON array of integers;
//! * a JSON object with such an array under `tokens` or `ids`, other keys ignored;
//! * raw little-endian 32-bit integers: content that is not printable text and whose size is a multiple of 4.
//!
//! An empty list, a negative id, an id that the model does not have and anything else is refused, naming the place. The
//! file is read once from front to end, so a pipe will do, and memory is the list itself plus a constant.

use std::io::{self, BufReader, Read};

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Most ids a file may hold; far beyond any context, far below what would hurt.
pub const MAX_IDS: usize = 1 << 22;
/// Most bytes read: 16 per id.
pub const MAX_BYTES: u64 = 16 * MAX_IDS as u64;
/// How much is looked at to tell the encodings apart.
const PEEK: usize = 1 << 16;

/// Why the ids are not usable.
#[derive(Debug, thiserror::Error)]
pub enum IdsError {
    /// The read broke.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// No ids at all.
    #[error(
        "the list is empty: the prompt has a single token, which the decoder evaluates itself, so there is nothing to hand over"
    )]
    Empty,
    /// Something else where an id should be.
    #[error("{place}: {what}")]
    Syntax {
        /// Line, byte or element.
        place: String,
        /// What is there and what should be.
        what: String,
    },
    /// An id the model does not have.
    #[error("{place}: id {id} is not in the vocabulary, whose {n_vocab} ids are 0 to {}{why}", n_vocab.saturating_sub(1))]
    Vocabulary {
        /// Line, byte or element.
        place: String,
        /// The id.
        id: i64,
        /// The size of the model's vocabulary.
        n_vocab: u32,
        /// Said when the file was taken for raw integers and may not be.
        why: String,
    },
    /// A negative id.
    #[error("{place}: id {id} is negative{why}")]
    Negative {
        /// Line, byte or element.
        place: String,
        /// The id as written.
        id: String,
        /// As in [`IdsError::Vocabulary`].
        why: String,
    },
    /// Broken JSON, or JSON that is not a list of ids.
    #[error("as JSON: {0}")]
    Json(serde_json::Error),
    /// Neither text nor a whole number of integers.
    #[error(
        "byte {at} is 0x{byte:02x}, so this is not text, and {size} bytes is not a whole number of 32-bit ids either"
    )]
    NotText {
        /// Offset of the first byte that is not text.
        at: u64,
        /// That byte.
        byte: u8,
        /// Size of the file.
        size: u64,
    },
    /// Text of another encoding.
    #[error("the file is UTF-16 text; write the ids as plain ASCII or UTF-8")]
    Utf16,
    /// More than [`MAX_IDS`] or [`MAX_BYTES`].
    #[error("the file holds more than {MAX_IDS} ids or {MAX_BYTES} bytes, which no context has room for")]
    TooLong,
}

/// Reads the ids of a model with `n_vocab` of them.
///
/// # Errors
/// See [`IdsError`]. Never an empty list.
pub fn read(mut source: impl Read, n_vocab: u32) -> Result<Vec<i32>, IdsError> {
    let mut head = Vec::new();
    source.by_ref().take(PEEK as u64).read_to_end(&mut head)?;
    let bom = if head.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
    let body = &head[bom..];
    if head.len() >= 4
        && (head.starts_with(b"\xff\xfe") && is_text(head[2]) && head[3] == 0
            || head.starts_with(b"\xfe\xff") && head[2] == 0 && is_text(head[3]))
    {
        return Err(IdsError::Utf16);
    }
    // One byte more than allowed, so that reaching the limit can be told from a file of just that size.
    let rest = (&mut source).take(MAX_BYTES + 1 - head.len() as u64);
    // A NUL stands neither in text nor in JSON, and is the top byte of every raw id below 2^24.
    let odd = body.iter().position(|&b| b == 0).or_else(|| body.iter().position(|&b| !is_text(b)));
    let json = matches!(body.iter().find(|b| !b.is_ascii_whitespace()), Some(b'[' | b'{')) && !body.contains(&0);
    let ids = if json {
        read_json(body.chain(rest), n_vocab)?
    } else if let Some(at) = odd {
        read_raw(head.as_slice().chain(rest), n_vocab, (bom + at) as u64, body[at])?
    } else {
        read_text(body.chain(rest), bom as u64, n_vocab)?
    };
    if ids.is_empty() { Err(IdsError::Empty) } else { Ok(ids) }
}

fn is_text(b: u8) -> bool {
    is_space(b) || (0x20..0x7f).contains(&b)
}

/// ASCII white space, with the vertical tab that `u8::is_ascii_whitespace` leaves out.
fn is_space(b: u8) -> bool {
    matches!(b, b' ' | b'\t'..=b'\r')
}

fn push(ids: &mut Vec<i32>, id: i32) -> Result<(), IdsError> {
    if ids.len() >= MAX_IDS {
        return Err(IdsError::TooLong);
    }
    ids.push(id);
    Ok(())
}

/// Calls `f` for each byte with its offset from `at`.
fn each_byte(source: impl Read, at: u64, mut f: impl FnMut(u64, u8) -> Result<(), IdsError>) -> Result<u64, IdsError> {
    let mut offset = at;
    for byte in BufReader::with_capacity(PEEK, source).bytes() {
        if offset >= MAX_BYTES {
            return Err(IdsError::TooLong);
        }
        f(offset, byte?)?;
        offset += 1;
    }
    Ok(offset)
}

fn read_text(source: impl Read, bom: u64, n_vocab: u32) -> Result<Vec<i32>, IdsError> {
    let mut ids = Vec::new();
    // The word being read; longer ones are cut, and refused by their length.
    let mut word = [0u8; 32];
    let mut len = 0usize;
    let mut line = 1u64;
    // Whether a comma may stand here: after an id, once.
    let mut comma_ok = false;
    let mut finish = |word: &[u8], len: usize, line: u64, end: u64| -> Result<(), IdsError> {
        let place = || format!("line {line} (byte {})", end - len as u64);
        let shown = || {
            let text: String = word.iter().map(|&b| char::from(b).escape_default().to_string()).collect();
            if len > word.len() { format!("\"{text}...\"") } else { format!("\"{text}\"") }
        };
        let digits = word.strip_prefix(b"-").unwrap_or(word);
        if len > word.len() || digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
            let what = format!("{} is not a decimal token id", shown());
            return Err(IdsError::Syntax { place: place(), what });
        }
        let value = digits.iter().fold(0i64, |v, &d| v.saturating_mul(10).saturating_add(i64::from(d - b'0')));
        if word[0] == b'-' {
            return Err(IdsError::Negative {
                place: place(),
                id: String::from_utf8_lossy(word).into(),
                why: String::new(),
            });
        }
        match i32::try_from(value) {
            Ok(id) if (id as u32) < n_vocab => push(&mut ids, id),
            _ => Err(IdsError::Vocabulary { place: place(), id: value, n_vocab, why: String::new() }),
        }
    };
    let end = each_byte(source, bom, |at, byte| {
        if !is_space(byte) && byte != b',' {
            if let Some(slot) = word.get_mut(len) {
                *slot = byte;
            }
            len = len.saturating_add(1);
            return Ok(());
        }
        if len > 0 {
            finish(&word[..len.min(word.len())], len, line, at)?;
            (len, comma_ok) = (0, true);
        }
        if byte == b',' {
            if !comma_ok {
                let what = "a comma with no id before it".to_owned();
                return Err(IdsError::Syntax { place: format!("line {line} (byte {at})"), what });
            }
            comma_ok = false;
        }
        line += u64::from(byte == b'\n');
        Ok(())
    })?;
    if len > 0 {
        finish(&word[..len.min(word.len())], len, line, end)?;
    }
    Ok(ids)
}

fn read_raw(source: impl Read, n_vocab: u32, odd_at: u64, odd: u8) -> Result<Vec<i32>, IdsError> {
    let mut ids = Vec::new();
    let mut word = 0u32;
    let mut bad = None;
    let why = || {
        format!(" (byte {odd_at} is 0x{odd:02x}, so the file was read as raw little-endian 32-bit ids, not as text)")
    };
    let size = each_byte(source, 0, |at, byte| {
        word = word >> 8 | u32::from(byte) << 24;
        if at % 4 == 3 && bad.is_none() {
            let place = || format!("byte {}", at - 3);
            let id = word.cast_signed();
            if id < 0 {
                bad = Some(IdsError::Negative { place: place(), id: id.to_string(), why: why() });
            } else if word >= n_vocab {
                bad = Some(IdsError::Vocabulary { place: place(), id: id.into(), n_vocab, why: why() });
            } else {
                push(&mut ids, id)?;
            }
        }
        Ok(())
    })?;
    // The size decides whether these were integers at all, so it is complained of first.
    if size % 4 != 0 {
        return Err(IdsError::NotText { at: odd_at, byte: odd, size });
    }
    bad.map_or(Ok(ids), Err)
}

fn read_json(source: impl Read, n_vocab: u32) -> Result<Vec<i32>, IdsError> {
    let mut counted = Counted { source, read: 0 };
    let mut ids = Vec::new();
    let result = {
        let mut json = serde_json::Deserializer::from_reader(BufReader::with_capacity(PEEK, &mut counted));
        Document { ids: &mut ids, n_vocab }.deserialize(&mut json).and_then(|()| json.end())
    };
    match result {
        _ if ids.len() > MAX_IDS || counted.read >= MAX_BYTES => Err(IdsError::TooLong),
        Ok(()) => Ok(ids),
        Err(e) if e.is_io() => Err(IdsError::Io(e.into())),
        Err(e) => Err(IdsError::Json(e)),
    }
}

struct Counted<R> {
    source: R,
    read: u64,
}
impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.source.read(buf)?;
        self.read += n as u64;
        Ok(n)
    }
}

/// The whole file: an array, or an object that holds one.
struct Document<'a> {
    ids: &'a mut Vec<i32>,
    n_vocab: u32,
}
impl<'de> DeserializeSeed<'de> for Document<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_any(self)
    }
}
impl<'de> Visitor<'de> for Document<'_> {
    type Value = ();
    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an array of token ids, or an object with one under \"tokens\" or \"ids\"")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        List { ids: self.ids, n_vocab: self.n_vocab }.visit_seq(seq)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut found = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == "tokens" || key == "ids" {
                if std::mem::replace(&mut found, true) {
                    return Err(de::Error::custom("more than one list: \"tokens\" or \"ids\", once"));
                }
                map.next_value_seed(List { ids: self.ids, n_vocab: self.n_vocab })?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        if found { Ok(()) } else { Err(de::Error::custom("the object has neither \"tokens\" nor \"ids\"")) }
    }
}

struct List<'a> {
    ids: &'a mut Vec<i32>,
    n_vocab: u32,
}
impl<'de> DeserializeSeed<'de> for List<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_seq(self)
    }
}
impl<'de> Visitor<'de> for List<'_> {
    type Value = ();
    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an array of token ids")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(id) = seq.next_element_seed(Id { n: self.ids.len(), n_vocab: self.n_vocab })? {
            self.ids.push(id);
            if self.ids.len() > MAX_IDS {
                return Err(de::Error::custom("too many ids"));
            }
        }
        Ok(())
    }
}

struct Id {
    n: usize,
    n_vocab: u32,
}
impl<'de> DeserializeSeed<'de> for Id {
    type Value = i32;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<i32, D::Error> {
        d.deserialize_any(self)
    }
}
impl Visitor<'_> for Id {
    type Value = i32;
    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a token id (a whole number) as element {}", self.n)
    }
    fn visit_u64<E: de::Error>(self, v: u64) -> Result<i32, E> {
        match i32::try_from(v) {
            Ok(id) if v < u64::from(self.n_vocab) => Ok(id),
            _ => Err(E::custom(format_args!(
                "element {}: id {v} is not in the vocabulary, whose {} ids are 0 to {}",
                self.n,
                self.n_vocab,
                self.n_vocab.saturating_sub(1)
            ))),
        }
    }
    fn visit_i64<E: de::Error>(self, v: i64) -> Result<i32, E> {
        Err(E::custom(format_args!("element {}: id {v} is negative", self.n)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ok(bytes: &[u8]) -> Vec<i32> {
        read(bytes, 50_000).unwrap_or_else(|e| panic!("{e}: {:?}", String::from_utf8_lossy(bytes)))
    }
    fn bad(bytes: &[u8]) -> String {
        match read(bytes, 50_000) {
            Err(e) => e.to_string(),
            Ok(ids) => panic!("{ids:?} from {:?}", String::from_utf8_lossy(bytes)),
        }
    }

    #[test]
    fn text() {
        for good in [
            "1\n2\n30\n",
            "1\n2\n30",
            "1 2 30",
            "1,2,30",
            "1, 2, 30\n",
            "1 ,2\t,\n30",
            "1\r\n2\r\n30\r\n",
            "\u{feff}1\n2\n30\n",
            "\n\n1\n\n2\n30\n\n",
            "1,2,30,",
            "1,\n2,\n30,\n",
            "001 02 30",
            "1\x0b2\x0c30",
        ] {
            assert_eq!(ok(good.as_bytes()), [1, 2, 30], "{good:?}");
        }
        assert_eq!(ok(b"0"), [0]);
        assert_eq!(ok(b"49999"), [49_999]);
    }

    #[test]
    fn text_refusals_name_the_place() {
        assert_eq!(bad(b"1\n2\nx3\n"), "line 3 (byte 4): \"x3\" is not a decimal token id");
        assert_eq!(bad(b"1\r\n-2\r\n"), "line 2 (byte 3): id -2 is negative");
        assert_eq!(
            bad(b"1\n50000\n"),
            "line 2 (byte 2): id 50000 is not in the vocabulary, whose 50000 ids are 0 to 49999"
        );
        assert_eq!(bad(b"1,,2"), "line 1 (byte 2): a comma with no id before it");
        assert_eq!(bad(b",1"), "line 1 (byte 0): a comma with no id before it");
        assert!(bad(b"99999999999999999999999999").contains("id 9223372036854775807"));
        assert!(bad(&[b'1'; 100]).contains("1111...\" is not"));
        for b in ["1.0", "+1", "0x10", "1e3", "-", "--1", "1;2", "[1", "1]", "one", "1_000"] {
            bad(b.as_bytes());
        }
        for empty in ["", "\n", " \r\n ", "\u{feff}", "\u{feff}\n", "[]", " [ ] ", "{\"tokens\":[]}"] {
            assert!(matches!(read(empty.as_bytes(), 9), Err(IdsError::Empty)), "{empty:?}");
        }
    }

    #[test]
    fn json() {
        for good in [
            "[1,2,30]",
            " [ 1 , 2 ,\n30 ]\n",
            "\u{feff}[1,2,30]\r\n",
            "{\"tokens\":[1,2,30]}",
            "{\"ids\":[1,2,30]}",
            "{\"model\":\"é\",\"n\":3.5,\"tokens\":[1,2,30],\"more\":{\"ids\":[7]}}",
        ] {
            assert_eq!(ok(good.as_bytes()), [1, 2, 30], "{good:?}");
        }
        assert!(bad(b"[1,\n-2]").contains("element 1: id -2 is negative at line 2"));
        assert!(bad(b"[1,50000]").contains("element 1: id 50000 is not in the vocabulary"));
        assert!(bad(b"[1,99999999999]").contains("not in the vocabulary"));
        assert!(bad(b"[1,2.0]").contains("as element 1"));
        assert!(bad(b"[1,[2]]").contains("as element 1"));
        assert!(bad(b"{\"tokens\":[{\"id\":1,\"piece\":\"a\"}]}").contains("as element 0"));
        assert!(bad(b"{\"tokens\":[1],\"ids\":[2]}").contains("more than one list"));
        assert!(bad(b"{\"tokens\":[1],\"tokens\":[2]}").contains("more than one list"));
        assert!(bad(b"{}").contains("neither"));
        for b in [
            "[1,2",
            "[1,2]x",
            "[1 2]",
            "[1,]",
            "{\"tokens\":5}",
            "{\"tokens\":null}",
            "[\"1\"]",
            "[true]",
            "[1]\n[2]",
            "[99999999999999999999999]",
        ] {
            bad(b.as_bytes());
        }
        bad(&b"[".repeat(100_000));
    }

    #[test]
    fn raw() {
        let raw = |ids: &[i32]| ids.iter().flat_map(|i| i.to_le_bytes()).collect::<Vec<_>>();
        assert_eq!(ok(&raw(&[1, 2, 30])), [1, 2, 30]);
        assert_eq!(ok(&raw(&[0])), [0]);
        // Ids whose low bytes look like text or JSON.
        assert_eq!(ok(&raw(&[0x5b, 0x7b, 0x3131, 0x2031])), [0x5b, 0x7b, 0x3131, 0x2031]);
        let many: Vec<i32> = (0..40_000).map(|i| i % 50_000).collect();
        assert_eq!(ok(&raw(&many)), many);
        assert!(bad(&raw(&[1, -1])).starts_with("byte 4: id -1 is negative (byte 1 is 0x00"));
        assert!(bad(&raw(&[1, 2, 50_000])).starts_with("byte 8: id 50000 is not"));
        assert!(bad(&raw(&[1, 2])[..7]).contains("7 bytes is not a whole number"));
        assert!(bad(b"1 2 3\0").contains("byte 5 is 0x00"));
        assert!(bad(b"1 2\0").contains("byte 3 is 0x00"));
        assert!(bad("1 é".as_bytes()).contains("byte 2 is 0xc3"));
    }

    #[test]
    fn utf16_is_named() {
        for text in ["1\n2\n", "[1]", "12"] {
            let le: Vec<u8> = [0xff, 0xfe].into_iter().chain(text.encode_utf16().flat_map(u16::to_le_bytes)).collect();
            assert!(bad(&le).contains("UTF-16"));
            let be: Vec<u8> = [0xfe, 0xff].into_iter().chain(text.encode_utf16().flat_map(u16::to_be_bytes)).collect();
            assert!(bad(&be).contains("UTF-16"));
        }
    }

    #[test]
    fn text_across_the_peek() {
        let ids: Vec<i32> = (0..50_000).collect();
        for sep in ["\n", ", ", "\r\n"] {
            let text: Vec<String> = ids.iter().map(i32::to_string).collect();
            assert_eq!(ok(text.join(sep).as_bytes()), ids);
        }
        assert_eq!(ok(serde_json::to_string(&ids).unwrap().as_bytes()), ids);
        // Odd bytes beyond the part that decides the encoding.
        let mut text = b"7\n".repeat(PEEK);
        text.extend_from_slice(b"8\0\n");
        assert!(bad(&text).contains(&format!("line {} (byte {})", PEEK + 1, 2 * PEEK)));
    }

    #[test]
    fn endless_input_ends() {
        assert!(matches!(read(io::repeat(0), 10), Err(IdsError::TooLong)));
        assert!(matches!(read(&b"{\"a\":\""[..], 10), Err(IdsError::Json(_))));
    }

    #[test]
    fn a_broken_read_is_told_from_bad_data() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::other("gone"))
            }
        }
        for start in ["[", "1 ", "\0\0\0\0"] {
            let padded = start.as_bytes().iter().copied().chain(std::iter::repeat_n(b' ', PEEK)).collect::<Vec<_>>();
            assert!(matches!(read(padded.as_slice().chain(Broken), 10), Err(IdsError::Io(_))), "{start:?}");
        }
    }
}
