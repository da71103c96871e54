//! `bench neighbour`: what a busy process on one of the cores costs each side. Both are kept to as many cores as they have
//! threads, the first of which they share with a thread that does nothing but count; everything is measured alone as well, in
//! turn.
//!
//! The neighbour leaves half a core to the one it disturbs, so whoever shares the rest evenly loses 0.5 / threads of the rate.
//! Threads that wait for each other after every operation lose more.

use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;

use anyhow::{Context as _, Result, anyhow, ensure};

use crate::locate::name;
use crate::machine::{self, Load};
use crate::ours::Ours;
use crate::peer::Peer;
use crate::prefill::{remark, yes};
use crate::run::Ended;
use crate::stats::median;
use crate::table::{self, percent};
use crate::{ids, run};

/// What is measured.
pub struct Neighbour {
    /// The model.
    pub model: PathBuf,
    /// Length of the prompt.
    pub prompt: u32,
    /// Runs of each.
    pub runs: u32,
    /// Threads of each side, which is how many cores they are kept to.
    pub threads: u32,
    /// The provider.
    pub ours: Ours,
    /// The other side.
    pub peer: Option<Peer>,
}

/// One side.
#[derive(Debug, Clone, Default)]
pub struct Row {
    /// Who.
    pub who: String,
    /// Tokens per second, run by run, without and with the neighbour.
    pub rates: [Vec<f64>; 2],
    /// The process from exec to exit, likewise.
    pub process_ms: [Vec<f64>; 2],
    /// What else ran; this program's busy thread is not counted.
    pub load: Load,
}

impl Row {
    /// The share of the rate that the neighbour costs.
    pub fn lost(&self) -> Option<f64> {
        let [alone, beside] = self.rates.each_ref().map(|r| median(r.iter().copied()));
        Some(1.0 - beside? / alone?)
    }

    fn add(&mut self, beside: bool, rate: f64, ended: &Ended) {
        self.rates[usize::from(beside)].push(rate);
        self.process_ms[usize::from(beside)].push(ended.process_ms);
        self.load += ended.load;
    }
}

/// A thread that keeps one core busy until it is dropped.
struct Busy {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Busy {
    /// Starts it; it runs on its core by the time this returns.
    fn start(core: usize) -> Result<Busy> {
        let stop = Arc::new(AtomicBool::new(false));
        let (ready, pinned) = mpsc::channel();
        let theirs = stop.clone();
        let work = move || {
            let result = machine::pin(&[core]);
            let go = result.is_ok();
            let _ = ready.send(result);
            let mut x = 1u64;
            // Real work and no hint to the processor that this is a loop of waiting, which would make room for others.
            while go && !theirs.load(Ordering::Relaxed) {
                for _ in 0..1000 {
                    x = black_box(x.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1));
                }
            }
        };
        let thread = std::thread::Builder::new().name("neighbour".to_owned()).spawn(work);
        let busy = Busy { stop, thread: Some(thread.context("starting the busy thread")?) };
        pinned.recv().map_err(|_| anyhow!("the busy thread ended before it began"))??;
        Ok(busy)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The cores that both sides are kept to: the first ones there are. The neighbour has the first of them.
fn cores(allowed: &[usize], threads: u32) -> Result<Vec<usize>> {
    let n = threads as usize;
    ensure!(
        allowed.len() >= n,
        "{n} threads need as many cores, but this process may use only {} ({allowed:?}); give a smaller -t",
        allowed.len()
    );
    Ok(allowed[..n].to_vec())
}

/// Measures.
///
/// # Errors
/// A side cannot prefill the prompt, or cannot be kept to its cores.
pub fn measure(p: &Neighbour, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>> {
    let vocabulary = ids::vocabulary(&p.model)?;
    run::warm(&vocabulary.files)?;
    let allowed = machine::allowed()?;
    let cores = cores(&allowed, p.threads)?;
    // Programs inherit this. The busy thread then takes the first core alone.
    machine::pin(&cores)?;
    let mut ours = Row { who: "npu-prefill".to_owned(), ..Row::default() };
    let mut peer = p.peer.as_ref().map(|peer| Row { who: peer.name.clone(), ..Row::default() });
    for i in 1..=p.runs {
        for beside in [false, true] {
            progress(&format!("run {i} of {}, {}", p.runs, if beside { "with a busy neighbour" } else { "alone" }));
            let _busy = if beside { Some(Busy::start(cores[0])?) } else { None };
            let (receipt, ended) = p.ours.prefill(&p.model, p.prompt, vocabulary.size)?;
            ours.add(beside, receipt.tokens_per_second, &ended);
            if let (Some(peer), Some(row)) = (&p.peer, &mut peer) {
                let (answer, ended) = peer.prefill(&p.model, p.prompt)?;
                row.add(beside, answer.tokens_per_second, &ended);
            }
        }
    }
    machine::pin(&allowed)?;
    Ok(std::iter::once(ours).chain(peer).collect())
}

/// The table for people.
pub fn report(p: &Neighbour, rows: &[Row]) -> String {
    let head = [
        "who",
        "alone tok/s",
        "with neighbour tok/s",
        "lost",
        "alone process ms",
        "with neighbour process ms",
        "others",
        "quiet",
    ];
    let of = |values: &[f64]| table::number(median(values.iter().copied()), 1);
    let lines: Vec<Vec<String>> = rows
        .iter()
        .map(|r| {
            vec![
                r.who.clone(),
                of(&r.rates[0]),
                of(&r.rates[1]),
                percent(r.lost(), 0),
                of(&r.process_ms[0]),
                of(&r.process_ms[1]),
                percent(r.load.share(), 1),
                yes(r.load.quiet(), "-").to_owned(),
            ]
        })
        .collect();
    let fair = 0.5 / f64::from(p.threads);
    let mut out = format!(
        "{}\nmodel {}, {} tokens, {} threads on as many cores, medians of {} runs in turn\n\n{}\n\
         The neighbour leaves half a core of {}: whoever shares the work evenly among what is left loses {}.\n",
        machine::description(),
        name(&p.model),
        p.prompt,
        p.threads,
        p.runs,
        table::markdown(&head, &lines),
        p.threads,
        percent(Some(fair), 0)
    );
    out += &remark(rows.iter().map(|r| r.load.quiet()));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_lost() {
        let row = Row { rates: [vec![100.0, 200.0, 300.0], vec![50.0, 60.0, 10.0]], ..Row::default() };
        assert_eq!(row.lost(), Some(0.75));
        assert_eq!(Row::default().lost(), None);
    }

    #[test]
    fn cores_are_the_first_ones() {
        assert_eq!(cores(&[3, 5, 8], 2).unwrap(), [3, 5]);
        let error = cores(&[3], 2).unwrap_err().to_string();
        assert!(error.contains("only 1") && error.contains("-t"), "{error}");
    }

    #[test]
    fn a_neighbour_comes_and_goes() {
        let core = machine::allowed().unwrap()[0];
        drop(Busy::start(core).unwrap());
        assert!(Busy::start(usize::MAX).is_err());
    }

    #[test]
    fn the_table_names_both() {
        let p = Neighbour {
            model: "dir/m.gguf".into(),
            prompt: 512,
            runs: 3,
            threads: 2,
            ours: Ours::new("o".into(), 2, None).unwrap(),
            peer: None,
        };
        let row = Row { who: "npu-prefill".into(), rates: [vec![100.0], vec![70.0]], ..Row::default() };
        let text = report(&p, &[row]);
        assert!(text.contains("| npu-prefill |") && text.contains("30 %") && text.contains("loses 25 %"), "{text}");
    }
}
