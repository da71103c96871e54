//! The socket between a decoder and whoever speaks for it: one message of a length and JSON, with descriptors attached.
//!
//! It knows nothing of what the message says. Every wait has a deadline, nothing is read past the length that was announced, and
//! descriptors are close-on-exec from the moment they arrive.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Descriptors that the kernel lets go with one message (`SCM_MAX_FD`).
pub const KERNEL_MAX_FDS: usize = 253;

/// What one side accepts from the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of JSON.
    pub body: usize,
    /// Descriptors.
    pub fds: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { body: kvlayout::HEADER_MAX as usize, fds: kvlayout::MAX_FDS }
    }
}

/// What came over the socket.
#[derive(Debug)]
pub struct Message {
    /// The JSON, without the length before it.
    pub body: Vec<u8>,
    /// The descriptors, in the order in which they were attached.
    pub fds: Vec<OwnedFd>,
}

/// Waits until something can be done with a descriptor. `false`: the deadline has passed.
pub fn wait(fd: BorrowedFd<'_>, what: PollFlags, deadline: Instant) -> Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // An hour at a time at most, so that the numbers fit whatever the deadline is.
        let left = left.min(Duration::from_secs(3600));
        let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::from_borrowed_fd(fd, what)], Some(&time)) {
            Ok(0) if Instant::now() >= deadline => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(e) => return Err(e).context("waiting for a descriptor"),
        }
    }
}

/// Waits for somebody to connect.
pub fn accept(listener: &UnixListener, deadline: Instant) -> Result<UnixStream> {
    listener.set_nonblocking(true).context("making the socket not block")?;
    loop {
        ensure!(wait(listener.as_fd(), PollFlags::IN, deadline)?, "nobody connected to the socket in time");
        match listener.accept() {
            Ok((stream, _)) => return Ok(stream),
            // Whoever it was is gone again; there may be another.
            Err(e) if [std::io::ErrorKind::WouldBlock, std::io::ErrorKind::Interrupted].contains(&e.kind()) => {}
            Err(e) if e.raw_os_error() == Some(Errno::CONNABORTED.raw_os_error()) => {}
            Err(e) => return Err(e).context("accepting the connection"),
        }
    }
}

/// Sends a message: its length as four little-endian bytes, the body, and the descriptors with the first byte of it.
pub fn send(stream: &UnixStream, body: &[u8], fds: &[BorrowedFd<'_>], deadline: Instant) -> Result<()> {
    let length = u32::try_from(body.len()).context("the message is longer than its length can say")?;
    send_raw(stream, &[&length.to_le_bytes(), body].concat(), fds, deadline)
}

/// Sends bytes as they are, the descriptors with the first of them.
pub fn send_raw(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>], deadline: Instant) -> Result<()> {
    stream.set_nonblocking(true).context("making the socket not block")?;
    let mut space = vec![MaybeUninit::uninit(); cmsg_space!(ScmRights(fds.len()))];
    let mut sent = 0;
    while sent < bytes.len() {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if sent == 0 && !fds.is_empty() {
            ensure!(control.push(SendAncillaryMessage::ScmRights(fds)), "no room for {} descriptors", fds.len());
        }
        match sendmsg(stream, &[IoSlice::new(&bytes[sent..])], &mut control, SendFlags::NOSIGNAL) {
            Ok(n) => sent += n,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let in_time = wait(stream.as_fd(), PollFlags::OUT, deadline)?;
                ensure!(in_time, "the other side took {sent} of {} bytes in time", bytes.len());
            }
            Err(e) => return Err(e).with_context(|| format!("sending: {sent} of {} bytes were taken", bytes.len())),
        }
    }
    Ok(())
}

/// Receives a message. Whatever is wrong with it, the descriptors that came are closed again.
pub fn receive(stream: &UnixStream, limits: Limits, deadline: Instant) -> Result<Message> {
    stream.set_nonblocking(true).context("making the socket not block")?;
    let mut fds = Vec::new();
    let mut length = [0; 4];
    fill(stream, &mut length, &mut fds, limits, deadline).context("the length of the message")?;
    let length = u32::from_le_bytes(length) as usize;
    ensure!(length > 0, "the message is announced to be empty");
    ensure!(
        length <= limits.body,
        "the message is announced to have {length} bytes; at most {} are taken",
        limits.body
    );
    let mut body = vec![0; length];
    fill(stream, &mut body, &mut fds, limits, deadline).context("the message")?;
    Ok(Message { body, fds })
}

/// Fills a buffer, and collects the descriptors that come with it.
fn fill(stream: &UnixStream, buf: &mut [u8], fds: &mut Vec<OwnedFd>, limits: Limits, deadline: Instant) -> Result<()> {
    let mut space = vec![MaybeUninit::uninit(); cmsg_space!(ScmRights(KERNEL_MAX_FDS))];
    let (mut got, len) = (0, buf.len());
    while got < len {
        // Room for as many as the kernel can send: if some are missing nevertheless, it is for want of free numbers.
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(stream, &mut [IoSliceMut::new(&mut buf[got..])], &mut control, RecvFlags::CMSG_CLOEXEC);
        // Taken over first, so that they are closed whatever comes now.
        let before = fds.len();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        let received = match received {
            Ok(received) => received,
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => {
                ensure!(wait(stream.as_fd(), PollFlags::IN, deadline)?, "{got} of {len} bytes came in time");
                continue;
            }
            Err(e) => return Err(e).with_context(|| format!("receiving: {got} of {len} bytes came")),
        };
        if received.flags.contains(ReturnFlags::CTRUNC) {
            let came = fds.len() - before;
            bail!("not all descriptors could be received, only {came}: this process may not open more (MSG_CTRUNC)");
        }
        ensure!(fds.len() <= limits.fds, "{} descriptors came; at most {} are taken", fds.len(), limits.fds);
        ensure!(received.bytes > 0, "the other side closed the socket after {got} of {len} bytes");
        got += received.bytes;
    }
    Ok(())
}
