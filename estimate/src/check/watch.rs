//! Steps measured while the machine stays as it is. In: a device, what runs a step. Out: stretches of steps, each between two looks at the
//! machine's speeds.

use crate::Refused;
use crate::hardware::Hardware;
use astrai_engine::machine::{Machine, Speedometer, Speeds};
use astrai_runtime::Profile;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Seconds of a step which finds little of what it reads in the caches.
const LONG: f64 = 1.0;
/// Stretches at least where there are so many programs that few seconds of each are enough.
const FEWEST: usize = 2;
/// Stretches of short steps, if as many steps are asked for and have not taken [`LONG`] together.
const STRETCHES: usize = 5;
/// Least part of the file's speed of products at which steps are measured without waiting for more.
const LEAST: f64 = 0.75;
/// Looks at the speeds again where they were less.
const LOOKS_AGAIN: usize = 10;
/// Seconds of steps of a stretch, at least: reading leaves nothing of a step in the caches.
const BETWEEN: f64 = 0.1;

/// Steps between two looks at the machine's speeds, and the fastest of each launch of as many more in each program.
#[derive(Clone, Default)]
pub struct Stretch {
    /// Of each step.
    pub seconds: Vec<f64>,
    /// Of each program.
    pub profiles: Vec<Profile>,
    /// None where speeds are not measured.
    pub now: Option<Speeds>,
}

impl Stretch {
    /// Seconds of the fastest step: whatever else the machine does only adds.
    pub fn fastest(&self) -> f64 {
        self.seconds.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// Keeps the faster of each launch.
    pub fn join(&mut self, found: &[Profile]) {
        if self.profiles.is_empty() {
            return self.profiles = found.to_vec();
        }
        for (all, found) in self.profiles.iter_mut().zip(found) {
            all.rows
                .iter_mut()
                .zip(&found.rows)
                .for_each(|(row, found)| row.fastest = row.fastest.min(found.fastest));
        }
    }
}

/// Measures while the machine stays as it is: cores of a virtual machine are moved, or others run on them, too, for seconds or minutes.
pub struct Watch<'a> {
    repeat: usize,
    meter: Option<Speedometer>,
    /// What is left of it.
    patience: &'a mut Duration,
    /// Seconds of steps beyond which no more than [`FEWEST`] stretches are run.
    pub enough: f64,
    /// Operations per second of small products in the hardware's file.
    told: Option<f64>,
}

impl<'a> Watch<'a> {
    /// `repeat` steps at least, on hardware of this file.
    pub fn new(
        hardware: &Hardware,
        machine: &Machine,
        repeat: usize,
        patience: &'a mut Duration,
    ) -> Watch<'a> {
        let meter = Some(&machine.device).filter(|_| hardware.kind == "cpu").and_then(Speedometer::new);
        Watch { repeat, meter, patience, enough: f64::INFINITY, told: hardware.product }
    }

    /// Bytes that it takes for itself.
    pub fn bytes(&self) -> u64 {
        self.meter.as_ref().map_or(0, |_| Speedometer::BYTES as u64)
    }

    /// The speeds now. Both threads may have one core when they are woken, which the system mends within a moment.
    fn look(&self) -> Option<Speeds> {
        let meter = self.meter.as_ref()?;
        let mut now = meter.now();
        for _ in 0..LOOKS_AGAIN {
            if self.as_told(now) {
                break;
            }
            sleep(Duration::from_millis(50));
            now = meter.now();
        }
        Some(now)
    }

    /// Whether products are as fast as the file has them: where both threads have one core, or another tenant shares it, this is another machine.
    fn as_told(&self, now: Speeds) -> bool {
        self.told.zip(now.product).is_none_or(|(told, now)| now > LEAST * told)
    }

    /// Stretches of steps, before and after each of which the machine is as fast; when patience has run out, of any. `step` runs one, and is
    /// told whether every launch is to be timed.
    pub fn steps(
        &mut self,
        mut step: impl FnMut(bool) -> Result<Vec<Profile>, String>,
    ) -> Result<Vec<Stretch>, Refused> {
        let mut kept: Vec<Stretch> = Vec::new();
        let mut before = self.look();
        while !self.are_enough(&kept) {
            let began = Instant::now();
            // What was read takes the place of what a step finds in the caches, unless that is little of the step.
            if kept.last().is_none_or(|last| last.fastest() < LONG) {
                step(false)?;
            }
            let mut stretch = Stretch::default();
            while stretch.seconds.iter().sum::<f64>() < BETWEEN {
                let started = Instant::now();
                step(false)?;
                stretch.seconds.push(started.elapsed().as_secs_f64());
                stretch.join(&step(true)?);
            }
            let after = self.look();
            let both = before.zip(after);
            let stays = both.is_none_or(|(before, after)| before.alike(after) && self.as_told(after));
            if stays || self.patience.is_zero() {
                stretch.now = both.and_then(|(before, after)| match stays {
                    true => Speeds::fastest(&[before, after]),
                    false => Some(before.between(after)),
                });
                kept.push(stretch);
            } else {
                *self.patience = self.patience.saturating_sub(began.elapsed());
            }
            before = after;
        }
        Ok(kept)
    }

    /// `repeat` steps in several stretches, or so many that take as long as is enough.
    fn are_enough(&self, kept: &[Stretch]) -> bool {
        let all = || kept.iter().flat_map(|stretch| &stretch.seconds);
        let (steps, sum) = (all().count(), all().sum::<f64>());
        steps >= self.repeat && (kept.len() >= self.repeat.min(STRETCHES) || sum >= LONG)
            || kept.len() >= FEWEST && sum >= self.enough
    }
}
