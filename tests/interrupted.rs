//! Runs that are stopped, killed or starved: whatever happens, the final name stands for a whole state or for nothing.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{BIN, Ran, Random, Scene};
use rustix::process::{Pid, Signal, kill_process};

/// A prompt that takes longer than any test waits: minutes, unless stopped.
fn endless() -> Scene {
    Scene::with(200_000, 4)
}

fn start(command: &mut Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits until the prefill is under way, by its own word.
fn wait_for_progress(child: &mut Child) -> impl Read + use<> {
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("progress:") {
        line.clear();
        assert_ne!(stderr.read_line(&mut line).unwrap(), 0, "ended without progress");
    }
    stderr
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// What is left of a run, its stderr read from `rest`.
fn end(mut child: Child, mut rest: impl Read) -> Ran {
    let mut stderr = String::new();
    rest.read_to_string(&mut stderr).unwrap();
    let mut stdout = String::new();
    child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    Ran { code: child.wait().unwrap().code(), stdout, stderr }
}

#[test]
fn a_signal_stops_a_run_and_leaves_nothing() {
    let scene = endless();
    for (sent, code, says) in
        [(Signal::TERM, 143, "SIGTERM"), (Signal::INT, 130, "SIGINT"), (Signal::HUP, 129, "SIGHUP")]
    {
        let mut child = start(&mut scene.command());
        let rest = wait_for_progress(&mut child);
        let at = Instant::now();
        signal(&child, sent);
        let ran = end(child, rest);
        ran.failed(code, says);
        assert!(at.elapsed() < Duration::from_secs(4), "took {:?}", at.elapsed());
        assert_eq!(scene.left(), [""; 0]);
    }
}

#[test]
fn a_signal_keeps_the_state_that_was_there() {
    let scene = endless();
    std::fs::write(&scene.out, "an older state").unwrap();
    let mut child = start(&mut scene.command());
    let rest = wait_for_progress(&mut child);
    signal(&child, Signal::TERM);
    end(child, rest).failed(143, "SIGTERM");
    assert_eq!(std::fs::read(&scene.out).unwrap(), b"an older state");
    assert_eq!(scene.left(), ["state.bin"]);
}

#[test]
fn signals_that_were_ignored_stay_ignored() {
    let scene = Scene::with(20_000, 2);
    let mut c = Command::new("/bin/sh");
    c.args(["-c", "trap '' INT HUP; exec \"$0\" \"$@\"", BIN]);
    c.arg("--tokens").arg(&scene.ids).arg("--out").arg(&scene.out).arg("--model").arg(&scene.model);
    let mut child = start(&mut c);
    std::thread::sleep(Duration::from_millis(200));
    signal(&child, Signal::INT);
    signal(&child, Signal::HUP);
    let stderr = child.stderr.take().unwrap();
    end(child, stderr).receipt();
    scene.state();
}

#[test]
fn the_deadline_stops_a_run() {
    let scene = endless();
    let at = Instant::now();
    scene.run(&["--deadline", "1.5"]).failed(75, "--deadline");
    assert!((1.4..6.0).contains(&at.elapsed().as_secs_f64()), "{:?}", at.elapsed());
    assert_eq!(scene.left(), [""; 0]);
}

#[test]
fn a_read_that_never_ends_is_ended() {
    // Nobody polls a flag here: the process is ended from its side.
    let scene = Scene::new(1);
    let fifo = scene.path("ids.fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let _writer = std::fs::File::options().read(true).write(true).open(&fifo).unwrap();
    let mut c = common::program();
    c.arg("--tokens").arg(&fifo).arg("--out").arg(&scene.out).arg("--model").arg(&scene.model);
    let mut child = start(&mut c);
    std::thread::sleep(Duration::from_millis(300));
    signal(&child, Signal::TERM);
    let stderr = child.stderr.take().unwrap();
    end(child, stderr).failed(143, "SIGTERM");
    assert_eq!(scene.left(), [""; 0]);
}

#[test]
fn progress_is_told_every_second() {
    let scene = endless();
    let mut child = start(scene.command().args(["--deadline", "6"]));
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let (mut lines, mut last, mut longest) = (0, Instant::now(), Duration::ZERO);
    let mut line = String::new();
    while stderr.read_line(&mut line).unwrap() > 0 {
        if line.contains("progress: ") {
            lines += 1;
            longest = longest.max(last.elapsed());
            last = Instant::now();
        }
        line.clear();
    }
    child.wait().unwrap();
    assert!((3..=6).contains(&lines) && longest < Duration::from_secs(3), "{lines} lines, longest gap {longest:?}");
}

/// Whether a process still runs; one that waits for its parent to notice its end does not.
fn is_running(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}

#[test]
fn the_parents_death_stops_a_run() {
    let scene = endless();
    let script = "\"$0\" \"$@\" 2>&1 & echo pid $!; wait";
    let mut c = Command::new("/bin/sh");
    c.args(["-c", script, BIN]);
    c.arg("--tokens").arg(&scene.ids).arg("--out").arg(&scene.out).arg("--model").arg(&scene.model);
    let mut shell = start(&mut c);
    let mut stdout = BufReader::new(shell.stdout.take().unwrap());
    let (mut line, mut pid) = (String::new(), String::new());
    while !line.contains("progress:") {
        line.clear();
        assert_ne!(stdout.read_line(&mut line).unwrap(), 0);
        if let Some(p) = line.strip_prefix("pid ") {
            pid = p.trim().to_owned();
        }
    }
    assert!(is_running(&pid));
    shell.kill().unwrap();
    shell.wait().unwrap();
    let killed = Instant::now();
    while is_running(&pid) {
        assert!(killed.elapsed() < Duration::from_secs(8), "it lives on");
        std::thread::sleep(Duration::from_millis(20));
    }
    // It holds no pipe open either: the stream ends.
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("the process that started this one is gone"), "{rest}");
    assert_eq!(scene.left(), [""; 0]);
}

#[test]
fn the_death_of_a_mere_thread_does_not() {
    // The kernel announces the death of the thread that started a process. Runtimes with thread pools let threads die.
    let scene = Scene::with(20_000, 2);
    let mut command = scene.command();
    let child = std::thread::spawn(move || start(&mut command)).join().unwrap();
    Ran::from(child.wait_with_output().unwrap()).receipt();
    scene.state();
}

/// Looks at a name as often as it can, and at every file that appears under it.
fn poll(path: &Path, want: Arc<Vec<u8>>, stop: &AtomicBool, looks: &AtomicU64, seen: &AtomicU64) {
    while !stop.load(Ordering::Relaxed) {
        if let Ok(bytes) = std::fs::read(path) {
            assert!(bytes == *want, "a partial file of {} bytes was seen, {} are whole", bytes.len(), want.len());
            seen.fetch_add(1, Ordering::Relaxed);
        }
        looks.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_hundred_kills_never_show_a_partial_file() {
    const KILLS: u64 = 100;
    let scene = Scene::new(1500);
    let started = Instant::now();
    scene.run::<&str>(&[]).receipt();
    let usual = started.elapsed();
    let want = Arc::new(std::fs::read(&scene.out).unwrap());
    std::fs::remove_file(&scene.out).unwrap();

    let stop = Arc::new(AtomicBool::new(false));
    let (looks, seen) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let poller = {
        let (path, want, stop, looks, seen) =
            (scene.out.clone(), want.clone(), stop.clone(), looks.clone(), seen.clone());
        std::thread::spawn(move || poll(&path, want, &stop, &looks, &seen))
    };
    let mut random = Random(3);
    let (mut killed, mut whole) = (0, 0);
    for i in 0..KILLS {
        let mut child = start(&mut scene.command());
        // The last part of a run is where the file gets its name: half of the kills aim there.
        let part = if i % 2 == 0 { random.below(1000) } else { 800 + random.below(400) };
        std::thread::sleep(usual.mul_f64(part as f64 / 1000.0));
        let _ = child.kill();
        let status = child.wait().unwrap();
        killed += u64::from(status.code().is_none());
        if scene.out.exists() {
            whole += 1;
            assert!(std::fs::read(&scene.out).unwrap() == *want);
            std::fs::remove_file(&scene.out).unwrap();
        }
    }
    stop.store(true, Ordering::Relaxed);
    poller.join().unwrap();
    assert!(killed > KILLS / 4, "only {killed} of {KILLS} were killed in time");
    assert!(looks.load(Ordering::Relaxed) > KILLS * 10);
    println!(
        "{killed} killed, {whole} whole files, seen {} times in {} looks",
        seen.load(Ordering::Relaxed),
        looks.load(Ordering::Relaxed)
    );

    // What a kill may leave is a temporary name, and the next run sweeps it.
    scene.run::<&str>(&[]).receipt();
    assert_eq!(scene.left(), ["state.bin"]);
}

#[test]
fn two_runs_to_one_name_end_with_a_whole_file() {
    let scene = Scene::new(400);
    let first = start(&mut scene.command());
    let second = start(&mut scene.command());
    for child in [first, second] {
        Ran::from(child.wait_with_output().unwrap()).receipt();
    }
    scene.state();
    assert_eq!(scene.left(), ["state.bin"]);
}

/// Runs the program in a mount namespace of its own after `prepare`; `None` where that is not allowed.
fn in_namespace(scene: &Scene, prepare: &str) -> Option<Ran> {
    let allowed = Command::new("unshare").args(["-rm", "true"]).output().is_ok_and(|o| o.status.success());
    if !allowed {
        println!("skipped: no mount namespaces here");
        return None;
    }
    let script = format!(
        "{prepare} || exit 99; cp \"$IDS\" \"$SLOTS/ids.txt\" 2>/dev/null; \"$@\"; code=$?; ls -A \"$SLOTS\" >\"$LEFT\"; exit $code"
    );
    let mut c = Command::new("unshare");
    c.args(["-rm", "/bin/sh", "-c", &script, "sh", BIN]);
    c.env("SLOTS", &scene.slots).env("IDS", scene.path("ids.txt")).env("LEFT", scene.path("left"));
    c.arg("--tokens").arg(scene.path("ids.txt")).arg("--out").arg(&scene.out).arg("--model").arg(&scene.model);
    std::fs::copy(&scene.ids, scene.path("ids.txt")).unwrap();
    Some(Ran::from(c.output().unwrap())).filter(|ran| ran.code != Some(99))
}

#[test]
fn a_full_disk_leaves_nothing() {
    let scene = Scene::new(600); // 150 kB of state
    // Too small from the start; and filled by someone else, so that the free blocks are there but not for us.
    for size in ["64k", "144k"] {
        let Some(ran) = in_namespace(&scene, &format!("mount -t tmpfs -o size={size} none \"$SLOTS\"")) else { return };
        ran.failed(74, "");
        let left = std::fs::read_to_string(scene.path("left")).unwrap();
        assert_eq!(left.trim(), "ids.txt");
        assert_eq!(scene.left(), [""; 0]);
    }
    let Some(ran) = in_namespace(&scene, "mount -t tmpfs -o size=1m none \"$SLOTS\"") else { return };
    ran.receipt();
}

#[test]
fn a_read_only_directory_is_told_from_a_full_one() {
    let scene = Scene::new(5);
    let prepare = "mount -t tmpfs -o size=1m none \"$SLOTS\" && mount -o remount,ro \"$SLOTS\"";
    let Some(ran) = in_namespace(&scene, prepare) else { return };
    ran.failed(73, "ead-only");
}

#[test]
fn a_limit_on_file_sizes_is_an_error_not_a_death() {
    let scene = Scene::new(600);
    let mut c = Command::new("/bin/sh");
    c.args(["-c", "ulimit -f 16; exec \"$0\" \"$@\"", BIN]);
    c.arg("--tokens").arg(&scene.ids).arg("--out").arg(&scene.out).arg("--model").arg(&scene.model);
    Ran::from(c.output().unwrap()).failed(74, "");
    assert_eq!(scene.left(), [""; 0]);
}

#[test]
fn a_pipe_that_nobody_reads_does_not_stop_a_run() {
    // Lines are dropped when there is no room for them; the state is written all the same.
    let scene = Scene::with(8_000, 3);
    let (_reader, writer) = std::io::pipe().unwrap();
    while rustix::event::poll(
        &mut [rustix::event::PollFd::new(&writer, rustix::event::PollFlags::OUT)],
        Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }),
    ) == Ok(1)
    {
        std::io::Write::write(&mut &writer, &[b' '; 4096]).unwrap();
    }
    let out = scene.command().stderr(writer).output().unwrap();
    Ran::from(out).receipt();
    scene.state();
}
