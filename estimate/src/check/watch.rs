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
/// Steps of a stretch, at least, if they have not taken [`LONG`] together: another tenant may have a core for as long as one of them.
const STEPS: usize = 3;
/// Steps of a stretch whose launches are timed, at most: of a small model there are thousands, which would be held beside it.
const TIMED: usize = 16;

/// Steps between two looks at the machine's speeds, and the launches of up to as many more.
#[derive(Default)]
pub struct Stretch {
    /// Of each step.
    pub seconds: Vec<f64>,
    /// Launches of each of these other steps, of each program.
    pub profiles: Vec<Vec<Profile>>,
    /// None where speeds are not measured.
    pub now: Option<Speeds>,
}

impl Stretch {
    /// Seconds of the step in the middle.
    pub fn middle(&self) -> f64 {
        middle(self.seconds.clone()).unwrap_or(f64::INFINITY)
    }
}

/// The number in the middle, the lesser of two: what else a machine does in a moment only adds. `None` of none.
pub fn middle(mut of: Vec<f64>) -> Option<f64> {
    of.sort_by(f64::total_cmp);
    of.get(of.len().saturating_sub(1) / 2).copied()
}

/// Looks at a processor's speeds with cores of its own.
pub struct Looks {
    meter: Speedometer,
    /// Operations per second of small products in the hardware's file.
    told: Option<f64>,
}

impl Looks {
    /// `None` where the hardware is no processor, or its speeds cannot be measured.
    pub fn of(hardware: &Hardware, machine: &Machine) -> Option<Looks> {
        let meter = Some(&machine.device).filter(|_| hardware.kind == "cpu").and_then(Speedometer::new)?;
        Some(Looks { meter, told: hardware.product })
    }

    /// The speeds now. Both threads may have one core when they are woken, which the system mends within a moment.
    pub fn now(&self) -> Speeds {
        let mut now = self.meter.now();
        for _ in 0..LOOKS_AGAIN {
            if self.as_told(now) {
                break;
            }
            sleep(Duration::from_millis(50));
            now = self.meter.now();
        }
        now
    }

    /// Whether products are as fast as the file has them: where both threads have one core, or another tenant shares it, this is another machine.
    fn as_told(&self, now: Speeds) -> bool {
        self.told.zip(now.product).is_none_or(|(told, now)| now > LEAST * told)
    }
}

/// Measures while the machine stays as it is: cores of a virtual machine are moved, or others run on them, too, for seconds or minutes.
pub struct Watch<'a> {
    repeat: usize,
    looks: Option<Looks>,
    /// What is left of it.
    patience: &'a mut Duration,
    /// Seconds of steps beyond which no more than [`FEWEST`] stretches are run.
    pub enough: f64,
}

impl<'a> Watch<'a> {
    /// `repeat` steps at least, on hardware of this file.
    pub fn new(
        hardware: &Hardware,
        machine: &Machine,
        repeat: usize,
        patience: &'a mut Duration,
    ) -> Watch<'a> {
        Watch { repeat, looks: Looks::of(hardware, machine), patience, enough: f64::INFINITY }
    }

    /// Bytes that it takes for itself.
    pub fn bytes(&self) -> u64 {
        self.looks.as_ref().map_or(0, |_| Speedometer::BYTES as u64)
    }

    fn look(&self) -> Option<Speeds> {
        self.looks.as_ref().map(Looks::now)
    }

    /// Whether the machine was the same before and after, and that of the file.
    fn stays(&self, before: Speeds, after: Speeds) -> bool {
        before.alike(after) && self.looks.as_ref().is_none_or(|looks| looks.as_told(after))
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
            if kept.last().is_none_or(|last| last.middle() < LONG) {
                step(false)?;
            }
            let mut stretch = Stretch::default();
            let short = |all: &[f64]| {
                let sum = all.iter().sum::<f64>();
                sum < BETWEEN || sum < LONG && all.len() < STEPS
            };
            while short(&stretch.seconds) {
                let started = Instant::now();
                step(false)?;
                stretch.seconds.push(started.elapsed().as_secs_f64());
                if stretch.profiles.len() < TIMED {
                    stretch.profiles.push(step(true)?);
                }
            }
            let after = self.look();
            let both = before.zip(after);
            let stays = both.is_none_or(|(before, after)| self.stays(before, after));
            if stays || self.patience.is_zero() {
                stretch.now = both.and_then(|(before, after)| match stays {
                    true => Speeds::over(&[before, after]),
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
