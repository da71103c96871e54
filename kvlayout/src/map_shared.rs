//! The map of a decoder's live memory: the same windows as in a state file, but in regions, with rows for the handed-over positions
//! only, and nothing around them. Nothing is written here either, and everything that can be refused about the memory's shape is.

use crate::map::check_rotation;
use crate::share::parts;
use crate::{KvMap, KvSpec, Order, Part, Refusal, ShareLayout, StateVersion, Window};
use std::io;

impl KvMap {
    /// The map of positions 0 to `n_tokens` - 1 in a shared memory. Its windows' offsets count from the beginning of their
    /// region, and every section keeps all positions, whatever its window: the decoder takes cell *i* as position *i*.
    ///
    /// # Errors
    /// When the layout is not one of the spec, the spec's rows cannot be written into it, or the prompt with its last token, which
    /// the decoder evaluates itself, does not fit.
    pub fn shared(spec: &KvSpec, layout: &ShareLayout, n_tokens: u32) -> Result<KvMap, Refusal> {
        if n_tokens == 0 {
            return Err(Refusal::NoTokens);
        }
        if n_tokens >= i32::MAX as u32 {
            return Err(Refusal::TooManyTokens(n_tokens as usize));
        }
        if spec.recurrent.is_some() {
            return Err(Refusal::SharedRecurrent);
        }
        if spec.v_trans {
            return Err(Refusal::SharedTransposed);
        }
        if spec.n_stream != 1 {
            return Err(Refusal::SharedStreams(spec.n_stream));
        }
        let mut windows = Vec::new();
        for (section, s) in spec.sections.iter().enumerate() {
            for l in &s.layers {
                for (part, elem, width) in parts(spec, s, l) {
                    check_rotation(section, part, width, if part == Part::K { s.n_rot.0 } else { s.n_rot.1 })?;
                    let found = layout.tensor(l.layer, part);
                    let Some(t) = found.filter(|t| t.ty == elem && t.ne[0] == u64::from(width)) else {
                        return Err(Refusal::SharedTensor {
                            layer: l.layer,
                            part,
                            want: format!("{elem} rows of {width}"),
                            found: found.map_or("none".into(), |t| format!("{} rows of {}", t.ty, t.ne[0])),
                        });
                    };
                    if t.ne[1] <= u64::from(n_tokens) {
                        let (cells, windowed) = (t.ne[1], s.window.is_some());
                        return Err(Refusal::SharedCells { section, n_tokens, cells, windowed });
                    }
                    windows.push((
                        l.layer,
                        part,
                        Window {
                            section,
                            region: t.region,
                            offset: t.offset,
                            row_bytes: t.row_bytes(),
                            elem,
                            width,
                            order: Order::Rows,
                            positions: 0..n_tokens,
                        },
                    ));
                }
            }
        }
        if let Some(t) = layout.tensors().iter().find(|t| !windows.iter().any(|w| (w.0, w.1) == (t.layer, t.part))) {
            return Err(Refusal::SharedTensor {
                layer: t.layer,
                part: t.part,
                want: "none".into(),
                found: format!("{} rows of {}", t.ty, t.ne[0]),
            });
        }
        if windows.is_empty() {
            return Err(Refusal::NoLayers);
        }
        windows.sort_by_key(|(_, _, w)| (w.region, w.offset));
        Ok(KvMap::of_windows(layout.size(), n_tokens, windows))
    }

    /// Bytes that are put in filling it: those of the windows and the fixed ones. In a state file that is all of them.
    pub fn filled(&self) -> u64 {
        let times = |w| if self.copied(w).is_some() { 2 } else { 1 };
        let windows: u64 = self.windows().map(|(_, _, w)| w.len() * times(w)).sum();
        windows + self.fixed().map(|(_, bytes)| bytes.len() as u64).sum::<u64>()
    }
}

impl ShareLayout {
    /// The state file of the rows that a shared memory holds: what the other route would have handed over, with a checkpoint
    /// where the version [has them](StateVersion::has_checkpoints).
    ///
    /// `read` fills the buffer with the region's bytes from an offset on. For whoever wants to restore a shared memory
    /// elsewhere, or to look at it with the tools for state files.
    ///
    /// # Errors
    /// What `read` fails with; [`io::ErrorKind::InvalidInput`] with the [`Refusal`] when there is no such state file or the layout
    /// is not the spec's; [`io::ErrorKind::OutOfMemory`].
    pub fn to_state_file(
        &self,
        spec: &KvSpec,
        tokens: &[i32],
        version: StateVersion,
        mut read: impl FnMut(u16, u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<Vec<u8>> {
        let refused = |r: Refusal| io::Error::new(io::ErrorKind::InvalidInput, r);
        let mut file = KvMap::state_file(spec, tokens, version).map_err(refused)?;
        if version.has_checkpoints() {
            file = file.with_checkpoint().map_err(refused)?;
        }
        let live = KvMap::shared(spec, self, file.n_tokens()).map_err(refused)?;
        let mut out = Vec::new();
        crate::MemSpace::new(&mut out, file.size())?;
        for (at, bytes) in file.fixed() {
            // In range, as is every window: the map is of this size.
            out[at as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        for (layer, part, to) in file.windows() {
            let from = live.window(layer, part).ok_or_else(|| refused(Refusal::NoLayers))?;
            let first = u64::from(to.positions.start) * from.row_bytes;
            let at = to.offset as usize..(to.offset + to.len()) as usize;
            read(from.region, from.offset + first, &mut out[at.clone()])?;
            if let Some(distance) = file.copied(to) {
                out.copy_within(at, (to.offset + distance) as usize);
            }
        }
        Ok(out)
    }
}
