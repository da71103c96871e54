//! A model file's bytes: mapped, or owned when a test or a fuzzer brings them. The crate's only `unsafe`.

use std::{fs::File, io, path::Path};

use memmap2::Mmap;

use crate::Error;

/// Read-only bytes of one file.
pub(crate) enum Mapped {
    File(Mmap),
    Owned(Vec<u8>),
}

impl Mapped {
    /// Maps a regular file. Anything else is an error here, not a hang (a pipe) or an odd errno (a directory) later.
    pub(crate) fn open(path: &Path) -> Result<Mapped, Error> {
        let fail = |doing: &'static str| move |source: io::Error| Error::Io { path: path.to_owned(), doing, source };
        // Asked by name first: opening a pipe would wait for a writer.
        let meta = std::fs::metadata(path).map_err(fail("opening"))?;
        if !meta.is_file() {
            let what = if meta.is_dir() { "is a directory, not a GGUF file" } else { "is not a regular file" };
            return Err(fail("opening")(io::Error::new(io::ErrorKind::InvalidInput, what)));
        }
        let file = File::open(path).map_err(fail("opening"))?;
        if file.metadata().map_err(fail("reading the size of"))?.len() == 0 {
            return Ok(Mapped::Owned(Vec::new())); // an empty mapping is an error on Linux; the parser says it better
        }
        // SAFETY: the mapping is read-only and lives exactly as long as `Mmap`, which every view borrows from. What the
        // type system cannot promise is that nobody rewrites or truncates the file meanwhile. Model files are written once
        // and then only read, and llama.cpp, which runs beside this program on the same file, rests on the same promise. If it
        // is broken all the same: plain integers and bytes have no invalid values; no length is read twice and trusted the
        // second time (offsets and sizes are kept outside the mapping, lengths inside arrays are checked at each read); text is
        // validated at each access; and a truncation ends in SIGBUS, not in foreign memory.
        let map = unsafe { Mmap::map(&file) }.map_err(fail("mapping"))?;
        Ok(Mapped::File(map))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Mapped::File(map) => map,
            Mapped::Owned(vec) => vec,
        }
    }
}
