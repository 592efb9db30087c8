//! How long a server waits for its clients. In: flags. Out: settings.

use astrai_serve::http::HttpSettings;
use clap::{Args, value_parser};
use std::time::Duration;

/// Seconds of each.
#[derive(Args)]
#[command(next_help_heading = "Time")]
pub struct TimeFlags {
    /// Seconds for a request's head to come, and between two requests of a connection, which is closed then
    #[arg(long, value_name = "SECONDS", default_value_t = 75, value_parser = value_parser!(u32).range(1..=86_400))]
    idle_timeout: u32,
    /// Seconds for a request's body to come; later it is refused with 408
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = value_parser!(u32).range(1..=86_400))]
    body_timeout: u32,
    /// Seconds in which a client must take something of what it is sent; its request is ended then
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = value_parser!(u32).range(1..=86_400))]
    stall_timeout: u32,
    /// Seconds of silence after which a stream is sent a comment, so that nothing between takes it for dead
    #[arg(long, value_name = "SECONDS", default_value_t = 12, value_parser = value_parser!(u32).range(1..=86_400))]
    ping_interval: u32,
    /// Seconds that requests may go on when the server is told to end
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = value_parser!(u32).range(..=86_400))]
    shutdown_timeout: u32,
}

impl TimeFlags {
    /// The same settings with these times.
    pub fn of(&self, settings: HttpSettings) -> HttpSettings {
        let seconds = |n: u32| Duration::from_secs(n.into());
        HttpSettings {
            idle_timeout: seconds(self.idle_timeout),
            body_timeout: seconds(self.body_timeout),
            stall_timeout: seconds(self.stall_timeout),
            keep_alive: seconds(self.ping_interval),
            shutdown_timeout: seconds(self.shutdown_timeout),
            ..settings
        }
    }
}
