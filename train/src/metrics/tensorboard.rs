//! Metrics for TensorBoard. In: rows. Out: `tensorboard/events.out.tfevents.…`, one file for each process of a run: records of TFRecord (length, checksum,
//! data, checksum), each with one `Event` in protobuf's encoding, of whose fields the few that scalars need are written here. The first
//! says the version; the second, that the process starts at its first step, upon which TensorBoard drops
//! what an earlier process wrote of that step and later ones.

use super::appended::Appended;
use super::{Row, Writer};
use astrai_files::FileError;
use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// What all names of event files begin with; then come seconds, by which readers order them.
const NAME: &str = "events.out.tfevents.";

/// The event file of this process.
#[derive(Debug)]
pub struct Events(Appended);

impl Events {
    /// Begins a file in this folder, made if need be, for a process whose first update is number `first`.
    ///
    /// # Errors
    /// The system refuses.
    pub fn create(folder: &Path, first: u64) -> Result<Events, FileError> {
        fs::create_dir_all(folder).map_err(FileError::io(folder, "create it"))?;
        let mut seconds = now() as u64;
        for entry in fs::read_dir(folder).map_err(FileError::io(folder, "list it"))? {
            let name = entry.map_err(FileError::io(folder, "list it"))?.file_name();
            let name = name.to_string_lossy();
            let before = name.strip_prefix(NAME).and_then(|rest| rest.split('.').next()?.parse::<u64>().ok());
            // Behind what another process began in the same second.
            seconds = seconds.max(before.map_or(0, |s| s.saturating_add(1)));
        }
        let path = folder.join(format!("{NAME}{seconds:010}.astrai.{}", std::process::id()));
        let mut events = Events(Appended::create_new(&path)?);
        events.append(&event(0, |e| bytes(e, FILE_VERSION, b"brain.Event:2")))?;
        events.append(&event(first, |e| {
            let mut log = Vec::new();
            integer(&mut log, STATUS, START);
            bytes(e, SESSION_LOG, &log);
        }))?;
        Ok(events)
    }

    fn append(&mut self, data: &[u8]) -> Result<(), FileError> {
        self.0.add(&record(data))
    }
}

impl Writer for Events {
    fn add(&mut self, row: &Row) -> Result<(), FileError> {
        let fields = super::fields(row);
        let fields =
            fields.map_err(|e| FileError::refused(&self.0.path, format!("a row is no JSON: {e}")))?;
        let mut summary = Vec::new();
        for (tag, value) in fields.iter().filter(|(tag, _)| *tag != "step") {
            let mut one = Vec::new();
            bytes(&mut one, TAG, tag.as_bytes());
            float(&mut one, SIMPLE_VALUE, value.as_f64().unwrap_or(f64::NAN) as f32);
            bytes(&mut summary, VALUE, &one);
        }
        self.append(&event(row.step(), |e| bytes(e, SUMMARY, &summary)))
    }

    fn sync(&self) -> Result<(), FileError> {
        self.0.sync()
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |t| t.as_secs_f64())
}

// Fields of tensorflow/core/util/event.proto and tensorflow/core/framework/summary.proto.
const WALL_TIME: u8 = 1;
const STEP: u8 = 2;
const FILE_VERSION: u8 = 3;
const SUMMARY: u8 = 5;
const SESSION_LOG: u8 = 7;
const VALUE: u8 = 1;
const TAG: u8 = 1;
const SIMPLE_VALUE: u8 = 2;
const STATUS: u8 = 1;
const START: u64 = 1;

/// An event of now.
fn event(step: u64, what: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut e = vec![WALL_TIME << 3 | 1];
    e.extend(now().to_le_bytes());
    integer(&mut e, STEP, step);
    what(&mut e);
    e
}

fn varint(out: &mut Vec<u8>, mut x: u64) {
    while x >= 0x80 {
        out.push(x as u8 | 0x80);
        x >>= 7;
    }
    out.push(x as u8);
}

fn integer(out: &mut Vec<u8>, field: u8, x: u64) {
    out.push(field << 3);
    varint(out, x);
}

fn bytes(out: &mut Vec<u8>, field: u8, x: &[u8]) {
    out.push(field << 3 | 2);
    varint(out, x.len() as u64);
    out.extend(x);
}

fn float(out: &mut Vec<u8>, field: u8, x: f32) {
    out.push(field << 3 | 5);
    out.extend(x.to_le_bytes());
}

/// Data as a record of TFRecord.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), data, &masked(data)].concat()
}

/// The checksum of a record: CRC-32C, turned and moved, because records may hold checksums themselves.
fn masked(data: &[u8]) -> [u8; 4] {
    let mut crc = u32::MAX;
    for byte in data {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    (!crc).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of CRC-32C is 0xe3069283; RFC 3720 has those of 32 zeros and 32 ones.
    #[test]
    fn checksums_are_the_published_ones() {
        let unmasked =
            |data: &[u8]| u32::from_le_bytes(masked(data)).wrapping_sub(0xa282_ead8).rotate_left(15);
        assert_eq!(unmasked(b"123456789"), 0xe306_9283);
        assert_eq!((unmasked(&[0; 32]), unmasked(&[0xff; 32])), (0x8a91_36aa, 0x62a8_ab43));
    }

    #[test]
    fn numbers_are_encoded_as_protobuf_has_them() {
        let mut out = Vec::new();
        integer(&mut out, STEP, 300);
        bytes(&mut out, TAG, b"lr");
        float(&mut out, SIMPLE_VALUE, 1.0);
        assert_eq!(out, [0x10, 0xac, 0x02, 0x0a, 2, b'l', b'r', 0x15, 0, 0, 0x80, 0x3f]);
    }
}
