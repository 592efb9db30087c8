//! Reading with nothing left to say.

use astrai_builders::config::ModelConfig;

/// A configuration read without a word, and the same after saving.
pub fn read_again(text: &str) -> ModelConfig {
    let r = ModelConfig::parse(text, "config.json").unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(r.warnings, Vec::<String>::new());
    let again = ModelConfig::parse(&r.config.save().to_string(), "saved").unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(again.config, r.config);
    assert_eq!(again.warnings, Vec::<String>::new());
    r.config
}
