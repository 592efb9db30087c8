//! What a server did over time. In: steps, one after another. Out: as many buckets as a picture has columns, however long it took.

/// Buckets, at most.
const BUCKETS: usize = 256;

/// The state of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moment {
    /// Sequences that run.
    pub running: f64,
    /// Sequences that wait.
    pub waiting: f64,
    /// Pages that sequences have.
    pub pages: f64,
}

/// Sums over the seconds of a bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Bucket {
    /// Seconds of steps.
    busy: f64,
    /// States, each times its seconds.
    states: [f64; 3],
    /// Tokens computed, and tokens of answers.
    tokens: [f64; 2],
}

/// Means of buckets of one length.
#[derive(Clone, Debug, Default)]
pub struct Series {
    width: f64,
    buckets: Vec<Bucket>,
    /// The end of the last step.
    end: f64,
    /// The greatest of each state.
    pub most: Moment,
}

impl Series {
    /// Adds a step from `at`, of so many seconds, in which so many tokens were computed and given.
    pub fn add(&mut self, at: f64, seconds: f64, moment: Moment, tokens: [f64; 2]) {
        if self.width == 0.0 {
            self.width = seconds.max(1e-9);
        }
        while at + seconds >= self.width * BUCKETS as f64 {
            self.halve();
        }
        let Moment { running, waiting, pages } = moment;
        let most = &mut self.most;
        (most.running, most.waiting) = (most.running.max(running), most.waiting.max(waiting));
        most.pages = most.pages.max(pages);
        let end = at + seconds;
        self.end = end;
        let [first, last] = [at, end].map(|t| (t / self.width) as usize);
        if self.buckets.len() <= last {
            self.buckets.resize(last + 1, Bucket::default());
        }
        for place in first..=last {
            let [begins, ends] = [place, place + 1].map(|p| self.width * p as f64);
            let here = (end.min(ends) - at.max(begins)).max(0.0);
            let b = &mut self.buckets[place];
            b.busy += here;
            for (sum, state) in b.states.iter_mut().zip([running, waiting, pages]) {
                *sum += state * here;
            }
            for (sum, n) in b.tokens.iter_mut().zip(tokens) {
                *sum += n * here / seconds.max(f64::MIN_POSITIVE);
            }
        }
    }

    /// Two buckets become one.
    fn halve(&mut self) {
        let joined = self.buckets.chunks(2).map(|pair| {
            pair.iter().fold(Bucket::default(), |sum, b| Bucket {
                busy: sum.busy + b.busy,
                states: [0, 1, 2].map(|i| sum.states[i] + b.states[i]),
                tokens: [0, 1].map(|i| sum.tokens[i] + b.tokens[i]),
            })
        });
        self.buckets = joined.collect();
        self.width *= 2.0;
    }

    /// Names of the columns of [`rows`](Self::rows).
    pub const COLUMNS: [&str; 7] =
        ["seconds", "busy", "running", "waiting", "pages", "tokens_per_s", "output_tokens_per_s"];

    /// A row a bucket: when it ends, the part of it in which there was a step, means of the states, tokens a second.
    pub fn rows(&self) -> impl Iterator<Item = [f64; 7]> {
        let (width, end) = (self.width, self.end);
        self.buckets.iter().enumerate().map(move |(i, b)| {
            let until = ((i + 1) as f64 * width).min(end);
            let here = (until - i as f64 * width).max(f64::MIN_POSITIVE);
            let [running, waiting, pages] = b.states.map(|sum| sum / here);
            let [all, given] = b.tokens.map(|n| n / here);
            [until, b.busy / here, running, waiting, pages, all, given]
        })
    }

    /// The mean of each state over all seconds.
    pub fn mean(&self) -> Moment {
        let mean = |i: usize| self.buckets.iter().map(|b| b.states[i]).sum::<f64>() / self.end.max(1e-9);
        Moment { running: mean(0), waiting: mean(1), pages: mean(2) }
    }
}
