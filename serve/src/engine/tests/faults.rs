//! Steps of a model that fail: who ends, and when the engine does.

use super::*;

/// Tokens of requests of which three run at a time.
const NINE: [usize; 9] = [40, 30, 20, 10, 9, 8, 7, 6, 5];

/// An engine whose sixth step fails, and so many in all, and its requests.
fn fails(most: usize, fault: impl Fn() -> Result<(), ModelError> + Send + 'static) -> (Engine, Vec<Stream>) {
    let ((go, ready), mut failed) = (channel(), 0);
    let model = Fake::faulty(SIZES, move |step| match step {
        0 => ready.recv().map_err(ModelError::from),
        5 if failed < most => {
            failed += 1;
            fault()
        }
        _ => Ok(()),
    });
    let engine = Engine::start(model, &Settings { sequences: Some(3), ..settings() }).unwrap();
    let streams = NINE.map(|most| engine.handle().submit(endless(most)).unwrap());
    go.send(()).unwrap();
    (engine, streams.into())
}

#[test]
fn a_step_that_fails_or_panics_ends_those_in_it_and_nobody_else() {
    let faults: [fn() -> Result<(), ModelError>; 2] = [|| Err(LOST.into()), || panic!("{LOST}")];
    for fault in faults {
        let (engine, mut streams) = fails(1, fault);
        let handle = engine.handle();
        for (i, stream) in streams.iter_mut().enumerate() {
            let (choices, end) = collect(stream, 1);
            let (tokens, want) = (&choices[0].0, expected(&endless(NINE[i]), 0, &[EOS]).0);
            match end {
                End::Failed(why) => assert!(i < 3 && why.contains(LOST) && want.starts_with(tokens)),
                End::Finished(_) => assert!(i >= 3 && *tokens == want),
                End::Cancelled(_) | End::Refused(_) => panic!("nobody cancels, and all may go on"),
            }
        }
        assert!(handle.is_ready());
        drop(engine);
        let stats = handle.stats();
        assert_eq!((stats.queued, stats.running, stats.failed, stats.finished), (0, 0, 3, 6));
        assert_eq!((stats.failed_steps, stats.pages_free + stats.pages_cached), (1, SIZES.pages));
    }
}

#[test]
fn a_draft_model_that_is_lost_is_not_asked_again() {
    let draft = Fake::draft(SIZES).failing_each(5).mortal();
    let failed = draft.failed();
    let settings = Settings { proposed: 3, ..settings() };
    let engine = Engine::start_drafted(Fake::new(SIZES), Some(Box::new(draft)), &settings).unwrap();
    let mut stream = engine.handle().submit(endless(40)).unwrap();
    let (choices, end) = collect(&mut stream, 1);
    assert!(matches!(end, End::Finished(_)) && choices[0].0 == expected(&endless(40), 0, &[EOS]).0);
    let stats = engine.handle().stats();
    assert_eq!((failed.load(Ordering::Relaxed), stats.failed_drafts, stats.failed), (1, 1, 0));
    assert!(stats.scheduler.accepted > 0);
}

/// That everybody is told, and that there is no engine any more.
fn dies((engine, mut streams): (Engine, Vec<Stream>), reason: &str) {
    let handle = engine.handle();
    for stream in &mut streams {
        let (_, end) = collect(stream, 1);
        assert!(matches!(&end, End::Failed(why) if why.contains(reason)), "{end:?}");
    }
    assert!(handle.dead().is_some_and(|why| why.contains(reason)) && !handle.is_ready());
    let refused = handle.submit(endless(1)).unwrap_err();
    assert!(matches!(refused, SubmitError::Dead(why) if why.contains(reason)));
    drop(engine);
    let stats = handle.stats();
    assert_eq!((stats.queued, stats.running, stats.failed), (0, 0, 9));
}

#[test]
fn a_model_that_goes_on_failing_fails_everybody_and_says_so() {
    dies(fails(usize::MAX, || Err(LOST.into())), LOST);
}

#[test]
fn a_model_that_goes_on_panicking_fails_everybody_and_says_so() {
    dies(fails(usize::MAX, || panic!("index {}", 5)), "panicked: index 5");
}
