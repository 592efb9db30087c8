//! Signals, proved on real processes: this binary runs itself as the child that is signalled.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use astrai_train::signals::Stop;

const CHILD: &str = "ASTRAI_TEST_SIGNALS_CHILD";

/// Not a test of its own: the child's program. It finishes in order (code 7) when it is asked to, or hangs on
/// after the first request, so that only the second signal ends it.
#[test]
fn child() {
    let Ok(mode) = std::env::var(CHILD) else { return };
    let stop = Stop::on_signals().expect("handlers");
    assert!(!stop.requested());
    println!("\nready");
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(20) {
        if stop.requested() {
            println!("\nasked");
            if mode == "leave" {
                std::process::exit(7);
            }
            std::thread::sleep(Duration::from_secs(20));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn start(mode: &str) -> (Child, impl FnMut(&str)) {
    let exe = std::env::current_exe().expect("this binary");
    let mut child = Command::new(exe)
        .args(["child", "--exact", "--nocapture"])
        .env(CHILD, mode)
        .stdout(Stdio::piped())
        .spawn()
        .expect("a child");
    let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    let wait = move |word: &str| {
        assert!(lines.any(|line| line.is_ok_and(|line| line == word)), "the child never said {word}");
    };
    (child, wait)
}

fn signal(child: &Child, signal: i32) {
    // SAFETY: the process is our child and not yet waited for, so its number is still its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

#[test]
fn the_first_signal_is_a_request() {
    for number in [libc::SIGINT, libc::SIGTERM] {
        let (mut child, mut wait) = start("leave");
        wait("ready");
        signal(&child, number);
        wait("asked");
        assert_eq!(child.wait().expect("ended").code(), Some(7));
    }
}

#[test]
fn the_second_signal_ends_the_process_at_once() {
    for (first, second, code) in [(libc::SIGINT, libc::SIGINT, 130), (libc::SIGINT, libc::SIGTERM, 143)] {
        let (mut child, mut wait) = start("hang");
        wait("ready");
        signal(&child, first);
        wait("asked");
        signal(&child, second);
        assert_eq!(child.wait().expect("ended").code(), Some(code));
    }
}

#[test]
fn a_request_by_hand_is_seen_by_clones() {
    let stop = Stop::default();
    let other = stop.clone();
    stop.request();
    assert!(other.requested());
}
