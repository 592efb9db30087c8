//! The engine with the fake model: answers, endings, faults.

mod faults;

use super::*;
use crate::request::{Request, Sampling};
use crate::tests::fake::{Fake, LOST, POISON, SIZES, WINDOWED, expected};
use astrai_builders::Windows;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};

const EOS: u32 = 5;

fn settings() -> Settings {
    Settings { eos: vec![EOS], ..Settings::default() }
}

fn start() -> Engine {
    Engine::start(Fake::new(SIZES), &settings()).unwrap()
}

/// An engine that takes one step a message.
fn gated() -> (Engine, Sender<()>) {
    let (steps, gate) = channel();
    (Engine::start(Fake::gated(SIZES, gate), &settings()).unwrap(), steps)
}

fn request(prompt: &[u32], most: usize) -> Request {
    let greedy = Sampling { temperature: 0.0, max_tokens: Some(most), ..Sampling::default() };
    Request { sampling: greedy, ..Request::new(prompt.to_vec()) }
}

/// A request that is sure to last.
fn endless(most: usize) -> Request {
    let bias = vec![(POISON, -100.0), (EOS, -100.0)];
    let mut long = request(&[9, 10], most);
    long.sampling.logit_bias = bias;
    long
}

/// Tokens of a choice, and why it ended.
type Answer = (Vec<u32>, Option<Finish>);

/// All of a request: tokens and finish of each choice, and the end, of which there must be one, and last.
fn collect(stream: &mut Stream, n: usize) -> (Vec<Answer>, End) {
    let mut choices = vec![(Vec::new(), None); n];
    while let Some(event) = stream.blocking_recv() {
        for update in event.updates {
            let at = update.index as usize;
            assert!(choices[at].1.is_none());
            choices[at].0.push(update.token);
            choices[at].1 = update.finish;
        }
        if let Some(end) = event.end {
            assert!(stream.blocking_recv().is_none(), "an event after the last");
            return (choices, end);
        }
    }
    panic!("no last event");
}

/// Numbers for tests, from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    fn request(&mut self) -> Request {
        let family = 7 + self.roll(3) as u32;
        let shared = (0..self.roll(20) as u32).map(|i| family + i % 7);
        let mut prompt: Vec<u32> = shared.collect();
        prompt.extend((0..1 + self.roll(9)).map(|_| 7 + self.roll(30) as u32));
        let room = SIZES.context() - prompt.len();
        let sampling = Sampling {
            temperature: [0.0, 0.7, 1.0, 1.5][self.roll(4)],
            top_k: [0, 5][self.roll(2)],
            top_p: [1.0, 0.9][self.roll(2)],
            min_p: [0.0, 0.1][self.roll(2)],
            frequency_penalty: [0.0, 0.5][self.roll(2)],
            repetition_penalty: [1.0, 1.2][self.roll(2)],
            // Of few tokens, so that it repeats itself.
            logit_bias: [vec![], vec![(7, 20.0), (8, 20.0), (EOS, 18.0)]][self.roll(2)].clone(),
            seed: Some(self.roll(1000) as u64),
            stop_ids: [vec![], vec![11, 12]][self.roll(2)].clone(),
            max_tokens: Some(1 + self.roll(room.min(30))),
            ignore_eos: self.roll(2) == 0,
            logprobs: [None, Some(2)][self.roll(2)],
            ..Sampling::default()
        };
        let n = if sampling.temperature > 0.0 { 1 + self.roll(3) as u32 } else { 1 };
        let salt = vec![self.roll(2) as u8];
        Request { n, priority: self.roll(2) as i32, salt, ..Request { sampling, ..Request::new(prompt) } }
    }
}

/// Sends requests one after the other, dropping, cancelling and stopping some; gives how many were answered whole.
fn client(handle: &Handle, seed: u64, requests: usize) -> usize {
    let (mut dice, mut whole) = (Dice(seed), 0);
    for _ in 0..requests {
        let request = dice.request();
        let mut stream = handle.submit(request.clone()).unwrap();
        match dice.roll(6) {
            0 => {
                (0..dice.roll(4)).for_each(|_| drop(stream.blocking_recv()));
                continue;
            }
            1 => stream.cancel(),
            2 => stream.stop(0),
            _ => {}
        }
        let (choices, end) = collect(&mut stream, request.n as usize);
        let mut failed = false;
        for (index, (tokens, finish)) in choices.iter().enumerate() {
            let (want, poisoned) = expected(&request, index as u32, &[EOS]);
            failed |= poisoned;
            let right = if finish.is_some() { *tokens == want } else { want.starts_with(tokens) };
            assert!(right, "choice {index} of {request:?} is {tokens:?}, alone {want:?}");
        }
        match end {
            End::Failed(why) => assert!(why.contains(LOST) || failed && why.contains("NaN"), "{why}"),
            End::Finished(usage) => {
                whole += usize::from(choices.iter().all(|c| c.1.is_some()));
                assert_eq!(usage.output, choices.iter().map(|c| c.0.len()).sum::<usize>());
                assert_eq!(usage.prompt, request.prompt.len());
            }
            End::Cancelled(_) => {}
            End::Refused(why) => panic!("{why}"),
        }
    }
    whole
}

#[test]
fn every_answer_is_that_of_the_request_alone() {
    for (sizes, prefix_cache, proposed, drafts, fails) in [
        (SIZES, true, 0, false, false),
        (SIZES, false, 0, false, false),
        (SIZES, true, 3, false, true),
        (SIZES, false, 4, false, false),
        (SIZES, true, 4, true, false),
        (WINDOWED, true, 0, false, true),
        (WINDOWED, false, 4, false, false),
        (WINDOWED, false, 3, true, true),
    ] {
        let model = if prefix_cache { Fake::threaded(sizes, 3) } else { Fake::new(sizes) };
        let model = if fails { model.failing_each(50) } else { model };
        // A draft model pays by the clock: it takes a small part of a step of this one.
        let model = if drafts { model.slow(Duration::from_micros(200)) } else { model };
        // Rows for proposed tokens are free where no more than so many run.
        let sequences = (proposed > 0).then_some(4);
        let settings = Settings { prefix_cache, proposed, sequences, ..settings() };
        let draft = Fake::draft(sizes).failing_each(7);
        let failed = [model.failed(), draft.failed()];
        let draft = drafts.then(|| Box::new(draft) as DraftModel);
        let engine = Engine::start_drafted(model, draft, &settings).unwrap();
        // Nothing is proposed while somebody waits.
        let clients = if proposed > 0 { 3 } else { 12 };
        let handles: Vec<Handle> = (0..clients).map(|_| engine.handle()).collect();
        let running = handles.into_iter().enumerate().map(|(i, handle)| {
            let seed = i as u64 * 77 + u64::from(prefix_cache);
            std::thread::spawn(move || client(&handle, seed, 1440 / clients))
        });
        let running = running.collect::<Vec<_>>();
        let whole: usize = running.into_iter().map(|c| c.join().unwrap()).sum();
        let handle = engine.handle();
        engine.drain(None);
        let stats = handle.stats();
        assert!(whole > 300, "only {whole} were answered whole");
        // No step failed that was not to: the fakes panic at what they should not be asked.
        let failed = failed.map(|count| count.load(Ordering::Relaxed));
        assert_eq!([stats.failed_steps, stats.failed_drafts], failed);
        assert_eq!(stats.pages, sizes.pages + sizes.windows.map_or(0, |w| w.pages));
        assert_eq!(stats.pages_free + stats.pages_cached, stats.pages);
        assert_eq!((stats.queued, stats.running, stats.waiting), (0, 0, 0));
        assert_eq!(stats.finished + stats.cancelled + stats.failed, 1440);
        assert!(stats.scheduler.preemptions > 0 && stats.scheduler.cache_hits > 0);
        assert!(stats.scheduler.forks > 0);
        assert!(prefix_cache || stats.pages_cached == 0);
        let speculated = [stats.scheduler.proposed, stats.scheduler.accepted].map(|n| n > 0);
        assert_eq!(speculated, [proposed > 0; 2], "{:?}", stats.scheduler);
    }
}

#[test]
fn finishes_are_told_apart() {
    let engine = start();
    let submit = |change: &dyn Fn(&mut Sampling)| {
        let mut request = request(&[9, 10, 11], 8);
        change(&mut request.sampling);
        let (choices, end) = collect(&mut engine.handle().submit(request).unwrap(), 1);
        assert!(matches!(end, End::Finished(_)));
        (choices[0].0.len(), choices[0].1.unwrap())
    };
    let force = |s: &mut Sampling, id| s.logit_bias = vec![(id, 100.0)];
    assert_eq!(submit(&|s| force(s, EOS)), (1, Finish::Eos));
    assert_eq!(submit(&|s| force(s, 20)), (8, Finish::Length));
    assert_eq!(submit(&|s| (force(s, 20), s.stop_ids.push(20)).1), (1, Finish::StopId(20)));
    assert_eq!(submit(&|s| (force(s, EOS), s.ignore_eos = true).1), (8, Finish::Length));
    let late = |s: &mut Sampling| {
        s.logit_bias = vec![(EOS, 100.0), (20, 50.0)];
        s.min_tokens = 3;
    };
    assert_eq!(submit(&late), (4, Finish::Eos));
}

/// Log-probabilities of a prompt's end are those of the whole; what comes before them is found in the cache.
#[test]
fn prompts_are_scored_from_where_it_is_asked() {
    let prompt: Vec<u32> = (0..21).map(|i| 7 + i * i % 11).collect();
    let scores = |engine: &Engine, from: usize| {
        let mut asked = request(&prompt, 1);
        (asked.sampling.prompt_logprobs, asked.sampling.scored_from) = (Some(0), from);
        let mut stream = engine.handle().submit(asked).unwrap();
        let (mut known, mut cached) = (vec![], 0);
        while let Some(event) = stream.blocking_recv() {
            known.extend(event.updates.into_iter().flat_map(|u| u.prompt).map(|l| l.chosen));
            if let Some(End::Finished(usage)) = event.end {
                cached = usage.cached;
            }
        }
        (known, cached)
    };
    for fake in [Fake::new(SIZES), Fake::of_two_programs(SIZES)] {
        let engine = Engine::start(fake, &settings()).unwrap();
        let (whole, cached) = scores(&engine, 1);
        assert_eq!((whole.len(), cached), (20, 0));
        for from in [0, 1, 2, 5, 9, 13, 20, 21, 40] {
            let (tail, cached) = scores(&engine, from);
            assert_eq!(tail, whole[from.clamp(1, 21) - 1..], "from {from}");
            assert_eq!(cached, (from.clamp(1, 21) - 1) / SIZES.page_size * SIZES.page_size);
        }
    }
}

#[test]
fn nan_ends_its_own_request_only() {
    let engine = start();
    let mut good = engine.handle().submit(endless(30)).unwrap();
    let mut bad = engine.handle().submit(request(&[9, POISON], 4)).unwrap();
    assert!(matches!(collect(&mut bad, 1).1, End::Failed(why) if why.contains("position 2")));
    let (choices, end) = collect(&mut good, 1);
    assert!(matches!(end, End::Finished(_)) && choices[0].0.len() == 30);
    assert_eq!(engine.handle().stats().failed, 1);
}

#[test]
fn whoever_leaves_is_gone_within_one_step() {
    let (engine, steps) = gated();
    let mut stays = engine.handle().submit(endless(12)).unwrap();
    let leaves = engine.handle().submit(endless(12)).unwrap();
    let mut cancels = engine.handle().submit(endless(12)).unwrap();
    (0..3).for_each(|_| steps.send(()).unwrap());
    (0..3).for_each(|_| assert!(stays.blocking_recv().unwrap().end.is_none()));
    drop(leaves);
    cancels.cancel();
    // The step that was begun before, and the one after.
    (0..2).for_each(|_| steps.send(()).unwrap());
    (0..2).for_each(|_| assert!(stays.blocking_recv().is_some()));
    let (_, end) = collect(&mut cancels, 1);
    assert!(matches!(end, End::Cancelled(usage) if usage.output <= 4));
    drop(steps);
    assert_eq!(collect(&mut stays, 1).0[0].0.len(), 7);
    let stats = engine.handle().stats();
    assert_eq!((stats.cancelled, stats.running), (2, 0));
}

#[test]
fn choices_are_stopped_one_by_one() {
    let engine = start();
    let mut all = endless(20);
    (all.n, all.sampling.temperature, all.sampling.seed) = (3, 1.0, Some(4));
    let mut stream = engine.handle().submit(all).unwrap();
    stream.stop(0);
    stream.stop(2);
    stream.stop(9);
    let (choices, end) = collect(&mut stream, 3);
    assert_eq!((choices[1].0.len(), choices[1].1), (20, Some(Finish::Length)));
    assert!(matches!(end, End::Finished(_)) && choices[0].1.is_none() && choices[2].1.is_none());
    assert!(choices[0].0.len() < 20 && choices[2].0.len() < 20);
    assert_eq!(engine.handle().stats().queued, 0);
}

#[test]
fn times_are_told_in_order() {
    let (steps, gate) = channel();
    let few = Settings { sequences: Some(1), ..settings() };
    let engine = Engine::start(Fake::gated(SIZES, gate), &few).unwrap();
    let begun = Instant::now();
    let [mut first, mut second] = [3, 2].map(|most| engine.handle().submit(endless(most)).unwrap());
    // The times of a request begin when it is submitted.
    let apart = begun.elapsed();
    let gone = engine.handle().submit(endless(1)).unwrap();
    gone.cancel();
    std::thread::sleep(Duration::from_millis(20));
    drop(steps);
    let usage = |stream: &mut Stream| match collect(stream, 1).1 {
        End::Finished(usage) | End::Cancelled(usage) => usage,
        End::Refused(why) | End::Failed(why) => panic!("{why}"),
    };
    let [a, b] = [&mut first, &mut second].map(|stream| {
        let usage = usage(stream);
        let times = [usage.queued, usage.first_token.unwrap(), usage.last_token.unwrap()];
        assert!(times.is_sorted());
        times
    });
    // The first waited for the gate, the second for all of the first.
    assert!(a[1] >= Duration::from_millis(20) && a[0] < a[1] && b[1] < b[2], "{a:?} {b:?}");
    assert!(b[0] + apart >= a[2], "{a:?} {b:?} {apart:?}");
    let stats = engine.handle().stats();
    assert_eq!((stats.prompt_tokens, stats.output_tokens, stats.kv_use()), (4, 5, 0.0));
}

#[test]
fn choices_that_wait_are_counted_one_by_one() {
    let (steps, gate) = channel();
    let few = Settings { queue: 4, sequences: Some(2), ..settings() };
    let engine = Engine::start(Fake::gated(SIZES, gate), &few).unwrap();
    let handle = engine.handle();
    let submit = |n: u32| {
        let mut all = endless(30);
        (all.n, all.sampling.temperature) = (n, 1.0);
        handle.submit(all)
    };
    // Whoever finds nobody waiting may bring more than the bound.
    let mut many = submit(9).unwrap();
    assert_eq!(submit(1).unwrap_err(), SubmitError::Busy(4));
    steps.send(()).unwrap();
    steps.send(()).unwrap();
    // The first step computes the prompt for both that may run.
    (0..2).for_each(|_| assert!(many.blocking_recv().is_some()));
    assert_eq!(handle.stats().queued, 7);
    // Two choices that run, and four that wait, are stopped.
    [0, 1, 2, 3, 4, 5].into_iter().for_each(|i| many.stop(i));
    (0..3).for_each(|_| steps.send(()).unwrap());
    while handle.stats().queued > 1 {
        std::thread::yield_now();
    }
    assert_eq!(submit(4).unwrap_err(), SubmitError::Busy(4));
    let three = submit(3).unwrap();
    drop((many, three, steps));
    engine.drain(None);
    assert_eq!(handle.stats().queued, 0);
}

#[test]
fn however_the_engine_goes_each_stream_ends_once() {
    for (seed, when) in (0..40).map(|i| (i, Duration::from_micros(i * 97))) {
        let engine = start();
        let mut dice = Dice(seed);
        let requests: Vec<Request> = (0..20).map(|_| dice.request()).collect();
        let streams = requests.iter().map(|r| engine.handle().submit(r.clone()).unwrap());
        let mut streams: Vec<Stream> = streams.collect();
        let handle = engine.handle();
        std::thread::sleep(when);
        drop(engine);
        for (stream, request) in streams.iter_mut().zip(&requests) {
            collect(stream, request.n as usize);
        }
        let stats = handle.stats();
        assert_eq!(stats.pages_free + stats.pages_cached, SIZES.pages);
        assert_eq!((stats.queued, stats.running, stats.waiting), (0, 0, 0));
    }
}

#[test]
fn no_more_tokens_may_wait_than_may() {
    let (steps, gate) = channel();
    let few = Settings { queue_tokens: Some(9), sequences: Some(1), ..settings() };
    let engine = Engine::start(Fake::gated(SIZES, gate), &few).unwrap();
    let handle = engine.handle();
    let mut first = handle.submit(endless(4)).unwrap();
    steps.send(()).unwrap();
    assert!(first.blocking_recv().is_some());
    // Those of a prompt that runs count no more; one that nobody is before may be longer.
    let long = handle.submit(request(&[7; 20], 1)).unwrap();
    assert_eq!(handle.submit(endless(4)).unwrap_err(), SubmitError::Full(9));
    drop(long);
    (0..2).for_each(|_| steps.send(()).unwrap());
    until_free(&handle);
    let _waits = [0; 4].map(|_| handle.submit(endless(4)).unwrap());
    assert_eq!(handle.submit(endless(4)).unwrap_err(), SubmitError::Full(9));
    drop(steps);
}

/// Waits until nobody is in the queue.
fn until_free(handle: &Handle) {
    while handle.stats().queued > 0 {
        std::thread::yield_now();
    }
}

#[test]
fn more_may_not_wait_than_may() {
    let (steps, gate) = channel();
    let few = Settings { queue: 2, sequences: Some(1), ..settings() };
    let engine = Engine::start(Fake::gated(SIZES, gate), &few).unwrap();
    let handle = engine.handle();
    let mut first = handle.submit(endless(4)).unwrap();
    steps.send(()).unwrap();
    assert!(first.blocking_recv().is_some());
    let _second = handle.submit(endless(4)).unwrap();
    let third = handle.submit(endless(4)).unwrap();
    assert_eq!(handle.submit(endless(4)).unwrap_err(), SubmitError::Busy(2));
    assert_eq!(handle.stats().queued, 2);
    // Whoever gives up waiting makes room.
    drop(third);
    steps.send(()).unwrap();
    steps.send(()).unwrap();
    (0..2).for_each(|_| assert!(first.blocking_recv().is_some()));
    let _fourth = handle.submit(endless(4)).unwrap();
    assert!(matches!(handle.submit(request(&[], 1)), Err(SubmitError::Invalid(e)) if e.param == "prompt"));
    drop(steps);
}

#[test]
fn who_is_to_have_a_free_sequence_does_not_wait() {
    let (steps, gate) = channel();
    let few = Settings { queue: 1, sequences: Some(2), ..settings() };
    let engine = Engine::start(Fake::gated(SIZES, gate), &few).unwrap();
    let handle = engine.handle();
    // At once, before the engine has looked: two run, and one waits.
    let mut three = [0; 3].map(|_| handle.submit(endless(9)).unwrap());
    assert_eq!(handle.submit(endless(9)).unwrap_err(), SubmitError::Busy(1));
    // The first step may have begun with the first alone.
    steps.send(()).unwrap();
    steps.send(()).unwrap();
    assert!(three[1].blocking_recv().is_some());
    assert_eq!((handle.stats().queued, handle.submit(endless(9)).is_err()), (1, true));
    drop((three, steps));
    engine.drain(None);
}

#[test]
fn draining_finishes_what_there_is() {
    let engine = start();
    let handle = engine.handle();
    let mut streams: Vec<_> = (0..10).map(|_| handle.submit(endless(30)).unwrap()).collect();
    engine.drain(None);
    assert!(streams.iter_mut().all(|s| collect(s, 1).0[0].0.len() == 30));
    assert_eq!(handle.submit(endless(1)).unwrap_err(), SubmitError::Draining);
}

#[test]
fn draining_without_patience_ends_everybody() {
    let (engine, steps) = gated();
    let handle = engine.handle();
    let mut streams: Vec<_> = (0..10).map(|_| handle.submit(endless(30)).unwrap()).collect();
    steps.send(()).unwrap();
    assert!(streams[0].blocking_recv().is_some_and(|e| e.end.is_none()));
    let ended = std::thread::spawn(move || engine.drain(Some(Duration::ZERO)));
    while handle.is_ready() {
        std::thread::yield_now();
    }
    drop(steps);
    ended.join().unwrap();
    for stream in &mut streams {
        let (_, end) = collect(stream, 1);
        assert!(matches!(end, End::Failed(why) if why.contains("shutting down")));
    }
    assert_eq!(handle.stats().pages_free + handle.stats().pages_cached, SIZES.pages);
}

#[test]
fn what_allows_no_step_does_not_start() {
    let refuse = |sizes: Sizes, settings: Settings| {
        Engine::start(Fake::new(sizes), &settings).map(|_| ()).unwrap_err().to_string()
    };
    assert!(refuse(SIZES, Settings { sequences: Some(7), ..settings() }).contains("7 sequences"));
    assert!(refuse(SIZES, Settings { tokens: Some(5), ..settings() }).contains("5 tokens"));
    assert!(refuse(SIZES, Settings { queue: 0, ..settings() }).contains("may be 0"));
    assert!(refuse(SIZES, Settings { eos: vec![37], ..settings() }).contains("eos"));
    let windows = |pages| Sizes { windows: WINDOWED.windows.map(|w| Windows { pages, ..w }), ..WINDOWED };
    assert!(refuse(windows(5), settings()).contains("too few for steps"));
    assert!(Engine::start(Fake::new(windows(6)), &settings()).is_ok());
    assert!(refuse(Sizes { positions: 0, ..SIZES }, settings()).contains("may be 0"));
}
