//! A model served: two prompts are continued side by side by the engine of `astrai serve`. Give a model directory, or a small
//! llama of this repository answers.

use astrai_engine::serving::{Room, steps};
use astrai_engine::{Kind, Machine, Model, unheard};
use astrai_ir::DType;
use astrai_serve::engine::{Engine, Settings};
use astrai_serve::request::{Request, Sampling};
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    astrai_serve::template::sandbox();
    let folder = std::env::args_os().nth(1).map(PathBuf::from);
    let own = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/llama"));
    let (model, machine) = (Model::open(&folder.unwrap_or_else(own), false)?, Machine::new(Kind::Cpu, 0)?);
    let room = Room { sequences: 2, queue: 2, ..Room::of_one(DType::F32, None) };
    let engine = Engine::start(steps(&model, &room, &machine, &mut unheard)?, &Settings::default())?;
    let ask = |prompt: &[u32]| {
        let mut request = Request::new(prompt.to_vec());
        request.sampling = Sampling { temperature: 0.0, max_tokens: Some(8), ..Sampling::default() };
        engine.handle().submit(request)
    };
    for mut answer in [ask(&[1, 2, 3])?, ask(&[7, 5])?] {
        let mut tokens = vec![];
        while let Some(event) = answer.blocking_recv() {
            tokens.extend(event.updates.iter().map(|u| u.token));
        }
        println!("{tokens:?}");
    }
    Ok(())
}
