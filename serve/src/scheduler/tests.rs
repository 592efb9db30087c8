//! The state machine under arbitrary arrivals and departures, with the fake model behind it.

use super::*;
use crate::engine::{Model, Sizes};
use crate::request::{Request, Sampling};
use crate::tests::fake::{Fake, POISON, SIZES, WINDOWED, expected_of};
use proptest::prelude::*;
use std::collections::HashMap;

impl Scheduler {
    /// What must hold between any two calls.
    fn check(&self) {
        let all: Vec<&Sequence> = self.slots.iter().flatten().collect();
        self.pages.check(all.iter().map(|s| (&s.tables, s.computed))).unwrap();
        assert_eq!(all.len(), self.waiting.len() + self.running.len());
        assert!(self.running.len() <= self.bounds.sequences);
        for slots in [&self.running, &Vec::from(self.waiting.clone())] {
            assert!(slots.is_sorted_by(|a, b| self.rank(*a) < self.rank(*b)));
        }
        for slot in &self.waiting {
            let s = self.slots[*slot as usize].as_ref().unwrap();
            assert!(s.tables.pages().iter().all(|p| p.is_empty()));
            assert!(s.computed == 0 && !self.running.contains(slot));
        }
        for slot in &self.running {
            let s = self.slots[*slot as usize].as_ref().unwrap();
            let [all, _] = s.tables.pages();
            assert!(all.len() >= self.pages.needed(s.computed) && s.computed <= s.tokens.len());
        }
    }
}

fn bounds(sizes: Sizes) -> Bounds {
    let Sizes { page_size, pages, windows, tokens, sequences, .. } = sizes;
    Bounds { page_size, pages, windows, tokens, sequences, rows: sequences, proposed: 0 }
}

/// A scheduler with a model, and what each sequence was asked and has answered.
struct World {
    scheduler: Scheduler,
    model: Fake,
    answers: HashMap<SequenceId, (Request, Vec<u32>)>,
    requests: u64,
    finished: usize,
}

impl World {
    fn new(sizes: Sizes, cache: bool) -> World {
        World::of(Fake::new(sizes), sizes, cache)
    }

    /// One whose model has programs of prefill and of decode.
    fn of_two_programs(sizes: Sizes, cache: bool) -> World {
        World::of(Fake::of_two_programs(sizes), sizes, cache)
    }

    fn of(model: Fake, sizes: Sizes, cache: bool) -> World {
        let scheduler = Scheduler::new(bounds(sizes), model.plan(), cache.then_some([1; 32]));
        World { scheduler, model, answers: HashMap::new(), requests: 0, finished: 0 }
    }

    fn add(&mut self, prompt: Vec<u32>, siblings: u32, priority: i32, most: usize) -> Vec<SequenceId> {
        // With speculation every other answer is of two tokens, so that it repeats itself.
        let few = self.scheduler.bounds.proposed > 0 && self.requests.is_multiple_of(2);
        let few = [(7, 50.0), (8, 50.0)].into_iter().filter(|_| few);
        let logit_bias: Vec<_> = [(POISON, -100.0)].into_iter().chain(few).collect();
        let greedy = Sampling { temperature: 0.0, max_tokens: Some(most), logit_bias, ..Sampling::default() };
        let request = Request { sampling: greedy, ..Request::new(prompt.clone()) };
        let number = self.requests;
        self.requests += 1;
        let prompt = Prompt::new(prompt, vec![]);
        let ids = (0..siblings).map(|index| {
            let arrival = Arrival {
                request: number,
                index,
                priority,
                tag: 0,
                prompt: prompt.clone(),
                most: prompt.tokens().len() + most,
                scored: None,
                embed: false,
            };
            let id = self.scheduler.add(arrival);
            self.answers.insert(id, (request.clone(), Vec::new()));
            id
        });
        ids.collect()
    }

    fn remove(&mut self, id: SequenceId) {
        self.scheduler.remove(id);
        self.answers.remove(&id);
        self.scheduler.check();
    }

    /// One step; the number of its tokens.
    fn step(&mut self) -> usize {
        let Some(plan) = self.scheduler.plan() else { return 0 };
        let computed = plan.entries().iter().map(|e| e.batch.tokens()).sum();
        let mut logits = vec![];
        self.model.step(plan, &mut logits).unwrap();
        let mut logits = logits.concat();
        self.scheduler.check();
        let rows: Vec<Row> = self.scheduler.rows().copied().collect();
        for (logits, row) in logits.chunks_mut(SIZES.vocabulary).zip(&rows) {
            logits[POISON as usize] = 0.0;
            let bias = &self.answers[&row.id].0.sampling.logit_bias;
            bias.iter().for_each(|(id, bias)| logits[*id as usize] += bias);
        }
        assert_eq!(rows.iter().map(|r| r.tokens).sum::<usize>(), computed);
        let best = |x: &[f32]| (0..x.len()).fold(0, |b, i| if x[i] > x[b] { i } else { b }) as u32;
        let chosen: Vec<u32> = logits.chunks(SIZES.vocabulary).map(best).collect();
        let mut last = None;
        let tokens = rows.iter().zip(&chosen).map(|(row, token)| {
            let sampled = row.complete && row.proposed.is_none_or(|proposed| last == Some(proposed));
            last = sampled.then_some(*token);
            last
        });
        let tokens: Vec<_> = tokens.collect();
        self.scheduler.complete(&tokens);
        self.scheduler.check();
        for (row, token) in rows.iter().zip(tokens) {
            let (request, answer) = self.answers.get_mut(&row.id).unwrap();
            answer.extend(token);
            if Some(answer.len()) == request.sampling.max_tokens {
                assert_eq!(*answer, expected_of(request, row.id.index, &[], self.model.separates_decode()).0);
                self.finished += 1;
                self.remove(row.id);
            }
        }
        computed
    }

    fn steps(&mut self, n: usize) {
        (0..n).for_each(|_| assert!(self.step() > 0));
    }

    fn finish(&mut self) {
        let mut steps = 0;
        while self.step() > 0 {
            steps += 1;
            assert!(steps < 10_000, "no end");
        }
        assert!(self.answers.is_empty());
        assert_eq!((self.scheduler.pages().owned(), self.scheduler.pages().owned_by_windows()), (0, 0));
    }
}

fn prompt() -> impl Strategy<Value = Vec<u32>> {
    // Few different prefixes, so that pages are shared; never the token that spoils logits.
    let tail = prop::collection::vec(7u32..37, 0..20);
    (0usize..3, 0usize..24, tail).prop_map(|(kind, shared, tail)| {
        let head = (0..shared).map(|i| (7 + kind * 5 + i % 5) as u32);
        head.chain(tail).chain([7]).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn answers_are_those_of_a_sequence_alone(
        cache in any::<bool>(),
        two_programs in any::<bool>(),
        proposed in 0usize..4,
        pages in 16usize..40,
        windows in prop::option::of((1usize..30, 0usize..20)),
        ops in prop::collection::vec((0u8..10, any::<u8>(), prompt(), 1u32..4, 1usize..20), 1..60),
    ) {
        let windows = windows.map(|(window, more)| {
            Windows { pages: (window + SIZES.tokens) / SIZES.page_size + 2 + more, window, every: false }
        });
        let sizes = Sizes { pages, windows, ..SIZES };
        let mut world = if two_programs { World::of_two_programs(sizes, cache) } else { World::new(sizes, cache) };
        world.scheduler.bounds.proposed = proposed;
        for (op, which, prompt, siblings, most) in ops {
            match op {
                0..=3 => {
                    let most = most.min(64 - prompt.len());
                    world.add(prompt, siblings, i32::from(which % 3), most);
                }
                4 => {
                    let mut ids: Vec<SequenceId> = world.answers.keys().copied().collect();
                    ids.sort_unstable_by_key(|id| (id.request, id.index));
                    if !ids.is_empty() {
                        world.remove(ids[usize::from(which) % ids.len()]);
                    }
                }
                _ => {
                    world.step();
                }
            }
            world.scheduler.check();
        }
        world.finish();
    }
}

#[test]
fn what_is_found_again_is_what_the_same_program_would_compute() {
    for two_programs in [false, true] {
        let mut world =
            if two_programs { World::of_two_programs(SIZES, true) } else { World::new(SIZES, true) };
        let prompt: Vec<u32> = (10..20).collect();
        let id = world.add(prompt.clone(), 1, 0, 9)[0];
        while world.answers[&id].1.len() < 8 {
            world.step();
        }
        let said = world.answers[&id].1.clone();
        world.finish();
        // 10 tokens and 8 of the answer are four full pages of the one sequence; two of them are the prompt's alone.
        let next = world.add([prompt.clone(), said, vec![9]].concat(), 1, 0, 9)[0];
        world.step();
        assert_eq!(world.scheduler.cached(next), Some(if two_programs { 8 } else { 16 }));
        world.finish();
        let computed = world.scheduler.counters();
        assert_eq!(
            computed.decoded,
            if two_programs { 16 } else { 0 },
            "all of an answer but its last token"
        );
    }
}

#[test]
fn what_is_accepted_saves_steps_and_what_is_not_leaves_no_page() {
    for two_programs in [false, true] {
        let mut world =
            if two_programs { World::of_two_programs(SIZES, true) } else { World::new(SIZES, true) };
        world.scheduler.bounds.proposed = 3;
        let id = world.add(vec![9], 1, 0, 40)[0];
        let mut steps = 0;
        while world.answers.contains_key(&id) {
            world.step();
            steps += 1;
            let length = 1 + world.answers.get(&id).map_or(0, |(_, answer)| answer.len());
            let owned = world.scheduler.pages().owned();
            assert!(owned <= world.scheduler.pages().needed(length), "{owned} pages of {length} tokens");
        }
        let Counters { proposed, accepted, .. } = world.scheduler.counters();
        assert!(
            accepted > 0 && accepted < proposed && steps + accepted == 40,
            "{steps}: {accepted} of {proposed}"
        );
        // Whoever waits gets what there is.
        (0..7).for_each(|_| drop(world.add(vec![9], 1, 0, 8)));
        let before = world.scheduler.counters().proposed;
        world.steps(6);
        assert_eq!((world.scheduler.waiting(), world.scheduler.counters().proposed), (1, before));
        world.finish();
    }
}

#[test]
fn siblings_compute_their_prompt_once_without_any_cache() {
    for two_programs in [false, true] {
        for length in [1, 2, 4, 5, 6, 15, 16, 17, 30] {
            let mut world =
                if two_programs { World::of_two_programs(SIZES, false) } else { World::new(SIZES, false) };
            let prompt: Vec<u32> = (0..length as u32).map(|i| 7 + i % 30).collect();
            let ids = world.add(prompt, 4, 0, 3);
            while world.scheduler.running() < 4 {
                world.step();
            }
            let (known, counters) = (length - 1, world.scheduler.counters());
            let owned = world.scheduler.pages().owned();
            let longest = ids.iter().map(|id| world.scheduler.get(*id).unwrap().tokens.len()).max().unwrap();
            let apart = longest.div_ceil(4) - known / 4;
            assert!(owned <= known / 4 + 4 * apart, "{length}: {owned} pages");
            let forks = if known > 0 { 3 } else { 0 };
            assert_eq!((counters.forks, counters.cache_hits), (forks, 3 * known as u64), "{length}");
            // One that goes takes nothing from the others.
            world.remove(ids[length % 4]);
            world.finish();
            let answered = world.scheduler.counters().computed;
            assert!(answered <= (length + 3 + 4 * 2) as u64, "{length}: {answered} tokens computed");
            assert_eq!(world.finished, 3);
        }
    }
}

#[test]
fn long_sequences_hold_few_pages_of_windowed_layers() {
    for cache in [true, false] {
        let mut world = World::new(WINDOWED, cache);
        let id = world.add((0..40).map(|i| 7 + i % 30).collect(), 1, 0, 23)[0];
        let mut most = 0;
        while world.answers.contains_key(&id) {
            world.step();
            let pages = world.scheduler.pages();
            most = most.max(pages.owned_by_windows());
            let decodes = world.answers.get(&id).is_some_and(|(_, answer)| answer.len() > 1);
            // Seven tokens lie in three pages at most.
            assert!(!decodes || pages.owned_by_windows() <= 3);
        }
        assert!(most <= (7 + 12) / 4 + 2 && world.scheduler.counters().preemptions == 0, "{most} pages");
        world.finish();
    }
}

/// What left the window is found again only while nothing else lies there, and never a prefix without its last window.
#[test]
fn a_prefix_is_found_with_its_last_window_or_not_at_all() {
    let mut world = World::new(WINDOWED, true);
    let prompt: Vec<u32> = (0..41).map(|i| 7 + i % 30).collect();
    let found = |world: &mut World, length: usize| {
        let id = world.add(prompt[..length].to_vec(), 1, 0, 2)[0];
        world.step();
        let found = world.scheduler.cached(id);
        world.finish();
        found.unwrap()
    };
    assert_eq!([41, 41, 30, 20].map(|n| found(&mut world, n)), [0, 40, 28, 16]);
    // Others take pages of windowed layers, those that were given back first before the rest.
    world.add(vec![36; 24], 1, 0, 1);
    world.finish();
    let after = [41, 21, 13, 9].map(|n| found(&mut world, n));
    assert_eq!(after[0], 40);
    assert!(after[1..].contains(&0), "{after:?}");
}

/// A copy of a page that is itself still to be copied: the pairs are in an order in which that is no matter.
#[test]
fn siblings_come_back_from_whichever_of_them_runs() {
    let mut world = World::new(Sizes { pages: 16, ..SIZES }, false);
    world.add((7..30).collect(), 5, 0, 20);
    let mut forks = 0;
    while world.step() > 0 {
        let Counters { forks: now, preemptions, .. } = world.scheduler.counters();
        assert!(now <= 4 + preemptions);
        forks = now;
    }
    let Counters { preemptions, .. } = world.scheduler.counters();
    assert!(preemptions > 0 && forks > 4, "{forks} forks, {preemptions} preemptions");
    assert_eq!((world.finished, world.scheduler.pages().owned()), (5, 0));
}

#[test]
fn those_who_run_get_their_token_while_a_long_prompt_is_computed() {
    let mut world = World::new(SIZES, true);
    world.add(vec![9], 1, 0, 8);
    world.step();
    world.add((0..40).map(|i| 7 + i % 30).collect(), 1, 0, 1);
    world.add(vec![8], 1, 0, 2);
    assert_eq!(world.step(), 12);
    assert!(world.scheduler.plan().is_some());
    let tokens: Vec<usize> = world.scheduler.rows().map(|r| r.tokens).collect();
    assert_eq!(tokens, [1, 11]);
    world.finish();
}

#[test]
fn a_chunk_of_a_long_prompt_goes_beside_as_many_decodes_as_there_are() {
    let sizes = Sizes { pages: 400, positions: 1024, tokens: 512, sequences: 16, ..SIZES };
    let mut world = World::new(sizes, true);
    let short: Vec<SequenceId> = (0..15).map(|i| world.add(vec![7 + i], 1, 0, 12)[0]).collect();
    assert_eq!(world.step(), 15);
    let long = world.add((0..900).map(|i| 7 + i % 29).collect(), 1, 0, 2)[0];
    for (done, chunk) in [(2, 497), (3, 403), (4, 1)] {
        assert_eq!(world.step(), 15 + chunk);
        assert!(short.iter().all(|id| world.answers[id].1.len() == done));
    }
    assert!(!world.answers.contains_key(&long));
    world.finish();
}

#[test]
fn siblings_hold_and_hash_their_prompt_once() {
    let mut world = World::new(SIZES, true);
    let prompt = Prompt::new((7..27).collect(), vec![]);
    for index in 0..128 {
        let arrival = Arrival {
            request: 0,
            index,
            priority: 0,
            tag: 0,
            prompt: prompt.clone(),
            most: 64,
            scored: None,
            embed: false,
        };
        world.scheduler.add(arrival);
    }
    assert_eq!(Arc::strong_count(&prompt), 129);
    assert!(world.scheduler.plan().is_some());
    assert_eq!(world.scheduler.rows().count(), 1, "the others wait for what they share");
}

#[test]
fn the_first_in_order_is_never_preempted_and_the_last_always() {
    let mut world = World::new(Sizes { pages: 16, ..SIZES }, false);
    let first = world.add((7..27).collect(), 1, 0, 40)[0];
    let second = world.add((8..28).collect(), 1, 0, 40)[0];
    let mut lost = false;
    while world.answers.contains_key(&first) {
        world.step();
        let slot = |id: SequenceId| world.scheduler.running.contains(&id.slot);
        assert!(slot(first) || !world.answers.contains_key(&first));
        lost |= !slot(second) && world.scheduler.counters().preemptions == 1;
    }
    assert!(lost);
    world.finish();
    assert_eq!(world.finished, 2);
}

#[test]
fn lower_priorities_go_first_and_equals_in_order() {
    let mut world = World::new(Sizes { sequences: 1, ..SIZES }, true);
    let ids: Vec<_> = [1, 0, 0].map(|priority| world.add(vec![7, 8], 1, priority, 1)[0]).into();
    let mut order = Vec::new();
    while !world.answers.is_empty() {
        let before: Vec<_> = world.answers.keys().copied().collect();
        world.step();
        order.extend(before.into_iter().filter(|id| !world.answers.contains_key(id)));
    }
    assert_eq!(order, [ids[1], ids[2], ids[0]]);
}

#[test]
fn the_batch_is_refilled_in_place() {
    let mut world = World::new(SIZES, true);
    (0..6).for_each(|i| drop(world.add(vec![7 + i; 9], 1, 0, 30)));
    world.steps(40);
    // Most sequences, most tokens and most pages were there.
    let space = |world: &World| {
        world.scheduler.plan.entries[0].batch.all().map(|(_, v)| (v.bytes.as_ptr(), v.bytes.capacity()))
    };
    let before = space(&world);
    world.steps(20);
    assert_eq!(space(&world), before);
    world.finish();
}
